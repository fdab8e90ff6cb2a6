//! `slipgate sleep` and `slipgate resume`.
use slipgate_ipc::{
    client::{ClientAnswer, MachineOrder, Target},
    engine::EngineRequest,
};

use crate::{
    args::VmArgs,
    brokers::{ANOTHER_ANSWER, ask_each, have_done, of_engine},
    machines,
};

/// Has what comes for a VM held from now on.
pub(crate) fn sleep(args: &VmArgs) -> anyhow::Result<()> {
    let request = of_engine(Target::Vm(args.vm.clone()), EngineRequest::Sleep);
    have_done(&args.pin_dir, &request, &args.vm)
}

/// Has the guest of a `slipgate run` go on, and what was held for the VM delivered: the guest first,
/// so that it answers what is delivered. A machine of another network namespace is meant only where no
/// VM of this one is called so.
pub(crate) fn resume(args: &VmArgs) -> anyhow::Result<()> {
    let request = of_engine(Target::Vm(args.vm.clone()), EngineRequest::Resume);
    let Some(machine) = machines::find(&args.vm)? else {
        return have_done(&args.pin_dir, &request, &args.vm);
    };
    let is_by_name = machine.status.name == args.vm;
    if !machine.is_here() {
        if is_by_name && let Ok(answer) = ask_each(&args.pin_dir, &request)? {
            return match answer {
                ClientAnswer::Done => Ok(()),
                _ => anyhow::bail!(ANOTHER_ANSWER),
            };
        }
        // What is held for it is held in its own network namespace.
        return machine.have_done(MachineOrder::Resume);
    }
    machine.have_done(MachineOrder::Resume)?;
    if machine.status.tap.is_none() {
        // In user mode nothing is held.
        return Ok(());
    }
    let name = machine.status.name;
    let request = of_engine(Target::Vm(name.clone()), EngineRequest::Resume);
    match ask_each(&args.pin_dir, &request)? {
        Ok(ClientAnswer::Done) => Ok(()),
        // It is not served any more.
        Err(asked) if asked.is_unknown() => Ok(()),
        Ok(_) => anyhow::bail!(ANOTHER_ANSWER),
        Err(asked) => Err(asked.error(&name)),
    }
}
