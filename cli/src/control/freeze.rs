//! `slipgate freeze` and `slipgate thaw`.
use slipgate_ipc::{
    client::{ClientRequest, Target},
    engine::EngineRequest,
};

use crate::{
    args::VmArgs,
    brokers::{have_done, of_engine},
};

/// Drops everything from and to a VM from now on.
pub(crate) fn freeze(args: &VmArgs) -> anyhow::Result<()> {
    let vm = args.vm.clone();
    have_done(&args.pin_dir, &ClientRequest::Freeze { vm }, &args.vm)
}

/// Lets it pass again.
pub(crate) fn thaw(args: &VmArgs) -> anyhow::Result<()> {
    let request = of_engine(Target::Vm(args.vm.clone()), EngineRequest::Thaw);
    have_done(&args.pin_dir, &request, &args.vm)
}
