//! `slipgate sleep` and `slipgate resume`.
use slipgate_ipc::{
    client::{ClientAnswer, MachineOrder, Target},
    engine::EngineRequest,
};

use crate::{
    args::VmArgs,
    brokers::{ask_each, have_done, of_engine},
    machines,
};

/// Has what comes for a VM held from now on.
pub(crate) fn sleep(args: &VmArgs) -> anyhow::Result<()> {
    let request = of_engine(Target::Vm(args.vm.clone()), EngineRequest::Sleep);
    have_done(&args.pin_dir, &request, &args.vm)
}

/// Has the guest of a `slipgate run` go on, and what was held for the VM delivered: the guest first,
/// so that it answers what is delivered.
pub(crate) fn resume(args: &VmArgs) -> anyhow::Result<()> {
    let request = of_engine(Target::Vm(args.vm.clone()), EngineRequest::Resume);
    let Some(machine) = machines::find(&args.vm)? else {
        return have_done(&args.pin_dir, &request, &args.vm);
    };
    machine.have_done(MachineOrder::Resume)?;
    if machine.status.tap.is_none() {
        // In user mode nothing is held.
        return Ok(());
    }
    let name = machine.status.name;
    let request = of_engine(Target::Vm(name.clone()), EngineRequest::Resume);
    match ask_each(&args.pin_dir, &request)? {
        Ok(ClientAnswer::Done) => Ok(()),
        // It is served in another network namespace.
        Err(asked) if asked.is_unknown() => Ok(()),
        Ok(_) => anyhow::bail!(crate::brokers::ANOTHER_ANSWER),
        Err(asked) => Err(asked.error(&name)),
    }
}
