//! Where the guard runs: XDP drops before an skb is made, but linearises large frames on a device
//! that offers TSO, so there it is only put on demand.
use slipgate_control::{
    Datapath, Result,
    attach::{Program, XdpMode},
};

use crate::{
    config::{Config, Xdp},
    host::offers_tso,
};

/// Puts the guard on a TAP, or takes it off, as `--xdp` says.
pub(super) fn guard(datapath: &Datapath, config: &Config, name: &str, ifindex: u32) -> Result<()> {
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
