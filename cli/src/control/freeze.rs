//! `slipgate freeze` and `slipgate thaw`.
use super::have_done;
use crate::{args::VmArgs, control_socket::Request};

/// Drops everything from and to a VM from now on.
pub(crate) fn freeze(args: &VmArgs) -> anyhow::Result<()> {
    let vm = args.vm.clone();
    have_done(&args.pin_dir, &Request::Freeze { vm }, &args.vm)
}

/// Lets it pass again.
pub(crate) fn thaw(args: &VmArgs) -> anyhow::Result<()> {
    let vm = args.vm.clone();
    have_done(&args.pin_dir, &Request::Thaw { vm }, &args.vm)
}
