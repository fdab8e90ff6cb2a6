//! Limits of 100 Mb/s that are compared.

use std::process::Command;

use anyhow::Result;
use slipgate_testbed::{World, baseline, world::UPLINK};

use super::BYTES_PER_SECOND;
use crate::{
    contender::{Contender, Stand, make_guest, make_world, own_version, version},
    machine::Pinning,
};

pub(super) const HTB: &str = "forwarding-htb";

/// Rate of full packets with their Ethernet headers, bytes per second.
const FRAME_BYTES_PER_SECOND: u32 = (BYTES_PER_SECOND as u64 * 1_514 / 1_500) as u32;

pub(super) fn all() -> Vec<Box<dyn Contender>> {
    vec![
        Box::new(Limit::Shaped),
        Box::new(Limit::Policed),
        Box::new(Limit::Htb),
    ]
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Limit {
    Shaped,
    /// Another device has the pacing device's name, and the TAP somebody else's queue.
    Policed,
    Htb,
}

impl Contender for Limit {
    fn name(&self) -> &'static str {
        match self {
            Self::Shaped => "slipgate",
            Self::Policed => "slipgate-policed",
            Self::Htb => HTB,
        }
    }

    fn version(&self) -> Result<String> {
        match self {
            Self::Shaped | Self::Policed => own_version(),
            Self::Htb => version("tc", "iproute2"),
        }
    }

    fn has_ipv6(&self) -> bool {
        true
    }

    fn set_up(&self, pinning: Pinning, ipv6: bool) -> Result<Stand> {
        let world = make_world(*self == Self::Htb, ipv6)?;
        let guest = make_guest(&world, pinning, ipv6)?;
        if *self == Self::Htb {
            baseline::plain_forwarding(&world, &guest)?;
            if ipv6 {
                baseline::plain_forwarding6(&world, &guest)?;
            }
            for device in [guest.tap(), UPLINK] {
                htb(&world, device)?;
            }
            return Ok(Stand::in_kernel(world, guest));
        }
        if *self == Self::Policed {
            world.host.ip("link add sgpace0 type bridge")?;
            tc(
                &world,
                &format!("qdisc add dev {} root handle 7: htb", guest.tap()),
            )?;
        }
        let rate = BYTES_PER_SECOND.to_string();
        let mut args = vec![
            "--tx-bytes-per-second",
            &rate,
            "--rx-bytes-per-second",
            &rate,
        ];
        if ipv6 {
            args.extend(["--ipv6", "nat"]);
        }
        Stand::attached(world, guest, &args, pinning)
    }
}

/// Limits what the host sends by a device, with a queue of 20 ms.
fn htb(world: &World, device: &str) -> Result<()> {
    let rate = u64::from(FRAME_BYTES_PER_SECOND) * 8;
    let queue = FRAME_BYTES_PER_SECOND / 50;
    tc(
        world,
        &format!("qdisc add dev {device} root handle 1: htb default 1"),
    )?;
    let class = format!("class add dev {device} parent 1: classid 1:1 htb rate {rate}bit");
    tc(world, &class)?;
    tc(
        world,
        &format!("qdisc add dev {device} parent 1:1 bfifo limit {queue}"),
    )
}

fn tc(world: &World, words: &str) -> Result<()> {
    let mut command = Command::new("tc");
    command.args(words.split(' '));
    world.host.output(command)?;
    Ok(())
}
