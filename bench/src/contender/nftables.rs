//! nftables' masquerade, the usual NAT of TAP devices, to which all ratios refer.

use anyhow::Result;
use slipgate_testbed::{Guest, World, baseline};

use super::{Contender, Stand, guest, process, world};
use crate::machine::Pinning;

pub(super) const NAME: &str = "nftables";

pub(super) struct Nftables;

impl Contender for Nftables {
    fn name(&self) -> &'static str {
        NAME
    }

    fn version(&self) -> Result<String> {
        process::version("nft", "nftables")
    }

    fn set_up(&self, pinning: Pinning) -> Result<Stand> {
        let world = World::with(world(true))?;
        let guest = Guest::new(&world, guest(pinning))?;
        baseline::masquerade(&world, &guest)?;
        Ok(Stand::in_kernel(world, guest))
    }
}
