//! `slipgate cut` and `slipgate generation`: flows end, now.
use anyhow::bail;
use slipgate_ipc::{
    client::{ClientAnswer, Target},
    engine::{EngineReply, EngineRequest},
};
use slipgate_model::FlowId;

use crate::{
    args::{CutArgs, VmArgs},
    brokers::{ask_each, of_engine},
    show::{print_once, table::counted},
};

/// Cuts each flow or VM that is named. A failure does not prevent the others.
pub(crate) fn run(args: &CutArgs) -> anyhow::Result<()> {
    let mut failed = Vec::new();
    let mut flows = 0;
    let named = args.what.iter().map(|text| target(text));
    let vms = args.vm.iter().map(|name| Target::Vm(name.clone()));
    for what in named.chain(vms) {
        let (Target::Flow(name) | Target::Vm(name)) = what.clone();
        match ask_each(&args.pin_dir, &of_engine(what, EngineRequest::Cut))? {
            Ok(ClientAnswer::Engine {
                reply: EngineReply::Cut { flows: more },
            }) => flows += more,
            Ok(_) => failed.push(format!("{name}: an answer to another question")),
            Err(asked) => failed.push(asked.error(&name).to_string()),
        }
    }
    // Where nothing was cut, why not says all there is.
    if flows > 0 || failed.is_empty() {
        print_once(&format!("cut {}\n", counted(flows, "flow")))?;
    }
    match failed.is_empty() {
        true => Ok(()),
        false => bail!("{}", failed.join("; ")),
    }
}

/// Ends the flows of a VM's former generation.
pub(crate) fn end_generation(args: &VmArgs) -> anyhow::Result<()> {
    let of_vm = of_engine(Target::Vm(args.vm.clone()), EngineRequest::EndGeneration);
    match ask_each(&args.pin_dir, &of_vm)? {
        Ok(ClientAnswer::Engine {
            reply: EngineReply::Cut { flows },
        }) => print_once(&format!(
            "ended {} of the former generation\n",
            counted(flows, "flow")
        )),
        Ok(_) => bail!("{}: an answer to another question", args.vm),
        Err(asked) => Err(asked.error(&args.vm)),
    }
}

/// Parses a target. A text in the form of a flow id is an id: no VM has such a name by chance.
pub(super) fn target(text: &str) -> Target {
    match FlowId::parse(text) {
        Some(_) => Target::Flow(text.to_owned()),
        None => Target::Vm(text.to_owned()),
    }
}
