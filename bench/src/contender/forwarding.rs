//! IP forwarding without NAT: the upper limit of the machine. A low result shows that the machine
//! was disturbed.

use anyhow::Result;
use slipgate_testbed::{Guest, World, baseline};

use super::{Contender, Stand, guest, world};
use crate::machine::{self, Pinning};

pub(super) struct Forwarding;

impl Contender for Forwarding {
    fn name(&self) -> &'static str {
        "forwarding"
    }

    fn version(&self) -> Result<String> {
        Ok(format!("Linux {}", machine::kernel()))
    }

    fn set_up(&self, pinning: Pinning) -> Result<Stand> {
        let world = World::with(world(true))?;
        let guest = Guest::new(&world, guest(pinning))?;
        baseline::plain_forwarding(&world, &guest)?;
        Ok(Stand::in_kernel(world, guest))
    }
}
