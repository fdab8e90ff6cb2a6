//! `slipgate sleep` and `slipgate resume`.
use slipgate_ipc::{client::Target, engine::EngineRequest};

use crate::{
    args::VmArgs,
    brokers::{have_done, of_engine},
};

/// Has what comes for a VM held from now on.
pub(crate) fn sleep(args: &VmArgs) -> anyhow::Result<()> {
    let request = of_engine(Target::Vm(args.vm.clone()), EngineRequest::Sleep);
    have_done(&args.pin_dir, &request, &args.vm)
}

/// Has what was held delivered.
pub(crate) fn resume(args: &VmArgs) -> anyhow::Result<()> {
    let request = of_engine(Target::Vm(args.vm.clone()), EngineRequest::Resume);
    have_done(&args.pin_dir, &request, &args.vm)
}
