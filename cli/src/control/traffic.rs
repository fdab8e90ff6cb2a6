//! Commands that stop a VM's traffic and let it go on: `slipgate freeze` and `thaw` drop it, `sleep`
//! and `resume` hold it.
use slipgate_ipc::{
    client::{ClientAnswer, ClientRequest, MachineOrder, Target},
    engine::EngineRequest,
};

use crate::{
    args::VmArgs,
    brokers::{ANOTHER_ANSWER, ask_each, have_done, of_engine},
    machines,
};

/// Drops everything from and to a VM from now on.
pub(crate) fn freeze(args: &VmArgs) -> anyhow::Result<()> {
    let vm = args.vm.clone();
    have_done(&args.pin_dir, &ClientRequest::Freeze { vm }, &args.vm)
}

/// Lets the VM's packets pass again.
pub(crate) fn thaw(args: &VmArgs) -> anyhow::Result<()> {
    let request = of_engine(Target::Vm(args.vm.clone()), EngineRequest::Thaw);
    have_done(&args.pin_dir, &request, &args.vm)
}

/// Has packets for a VM held from now on.
pub(crate) fn sleep(args: &VmArgs) -> anyhow::Result<()> {
    let request = of_engine(Target::Vm(args.vm.clone()), EngineRequest::Sleep);
    have_done(&args.pin_dir, &request, &args.vm)
}

/// Resumes the guest of a `slipgate run`, and has the packets that were held for the VM delivered: the guest first,
/// so that it answers them. A machine of another network namespace is meant only where no
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
