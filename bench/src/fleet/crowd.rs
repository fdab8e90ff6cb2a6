//! A daemon with VMs whose guests the benchmark itself plays: it writes their frames.
use std::{net::SocketAddrV4, time::Duration};

use anyhow::{Context as _, Result};
use nix::time::ClockId;
use slipgate_testbed::{
    World, affinity,
    frame::{FrameBuilder, Mac, with_vnet},
    tap::TapQueue,
    world::GATEWAY_MAC,
};

use super::daemon::{Daemon, GUEST};
use crate::{contender, injector::Injector, machine::Pinning};

/// Any: slipgate does not ask for one here.
pub(crate) const GUEST_MAC: Mac = [0x02, 0, 0, 0, 0, 0x15];
/// The payload of a frame of 64 bytes.
const PAYLOAD_BYTES: usize = 22;

/// VMs of one daemon. All have the same address and MAC, so all can send the same frames.
///
/// The order of the fields is the order in which they are dropped.
pub(super) struct Crowd {
    pub(super) daemon: Daemon,
    pub(super) taps: Vec<TapQueue>,
    pub(super) world: World,
}

impl Crowd {
    /// Starts a daemon with these flags, on the CPU of the middle, and adds so many VMs with these
    /// quotas, which are JSON.
    pub(super) fn new(vms: usize, flags: &[&str], quotas: &str, pinning: Pinning) -> Result<Self> {
        let mut config = contender::world(false);
        config.server_addresses.extend(super::probes::servers());
        let world = World::with(config)?;
        let daemon = affinity::on_cpu(pinning.middle, || Daemon::serve(&world, flags))?;
        let mut crowd = Self {
            daemon,
            taps: Vec::with_capacity(vms),
            world,
        };
        for number in 0..vms {
            let name = format!("crowd{number}");
            crowd.taps.push(TapQueue::alone(&crowd.world.host, &name)?);
            let body = format!("{{\"tap\": \"{name}\", \"quotas\": {quotas}}}");
            crowd
                .daemon
                .ask("PUT", &format!("/v1/vms/{name}"), &body)
                .with_context(|| format!("adding {name}"))?;
        }
        Ok(crowd)
    }

    /// Returns a writer of a VM's frames.
    pub(super) fn injector(&self, vm: usize) -> Injector {
        Injector::Tap(self.taps[vm].clone())
    }
}

/// Makes a datagram of a guest, which begins with `text`.
pub(super) fn datagram(from: u16, to: SocketAddrV4, text: &[u8]) -> Vec<u8> {
    let mut payload = [0; PAYLOAD_BYTES];
    payload[..text.len()].copy_from_slice(text);
    let frame = FrameBuilder::udp(SocketAddrV4::new(GUEST, from), to).payload(&payload);
    let (vnet, frame) = frame.macs(GUEST_MAC, GATEWAY_MAC).build();
    with_vnet(vnet, &frame)
}

/// Time of the machine's monotonic clock.
pub(super) fn now() -> Result<Duration> {
    Ok(ClockId::CLOCK_MONOTONIC.now()?.into())
}

/// Makes this thread run as soon as it can, where that is permitted, so that a measurement does not
/// contain its own waits for a CPU. It must sleep most of the time.
pub(super) fn precede_others() {
    let how = libc::sched_param { sched_priority: 1 };
    // SAFETY: the parameters are readable; 0 is the calling thread.
    let _ = unsafe { libc::sched_setscheduler(0, libc::SCHED_FIFO, &raw const how) };
}
