//! Placement of the guard. XDP drops frames before an skb is allocated, but linearises large frames
//! on a device that offers TSO. So on such a device the guard is attached on request only.
use slipgate_abi::IfIndex;
use slipgate_control::{
    Datapath, HeldGuard, Result,
    attach::{Program, XdpMode},
};

use super::Attached;
use crate::{
    config::{Config, Xdp},
    host::offers_tso,
};

impl Attached {
    /// Has the guard placed at TAPs without a wait from now on ([`HeldGuard`]), in a daemon, whose TAPs
    /// come and go. It takes privileges that the broker gives up; without them the kernel makes it wait.
    pub(crate) fn hold_guard(&mut self) {
        if !self.config.is_daemon || self.config.xdp == Xdp::Off {
            return;
        }
        match HeldGuard::of(&self.datapath) {
            Ok(held) => self.held_guard = Some(held),
            Err(e) => tracing::info!(
                "the guard is not held, so adding a TAP may wait for the kernel: {e}"
            ),
        }
    }
}

/// Attaches the guard to a TAP, or detaches it, according to `--xdp`.
pub(super) fn guard(
    datapath: &Datapath,
    config: &Config,
    name: &str,
    ifindex: IfIndex,
) -> Result<()> {
    let wanted = match config.xdp {
        Xdp::On => true,
        Xdp::Off => false,
        Xdp::Auto => offers_tso(name).is_ok_and(|tso| !tso),
    };
    if !wanted {
        return datapath.detach(Program::Guard, ifindex).map(drop);
    }
    match datapath.attach_guard(ifindex, XdpMode::Native) {
        Err(native) if config.xdp == Xdp::On => {
            tracing::warn!("no native XDP on {name} ({native}); using the generic one");
            datapath.attach_guard(ifindex, XdpMode::Generic)
        }
        Err(native) => {
            tracing::debug!("no native XDP on {name} ({native})");
            Ok(())
        }
        Ok(()) => Ok(()),
    }
}
