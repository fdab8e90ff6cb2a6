//! Relays that are compared.

use std::{fs, process::Command};

use anyhow::{Context as _, Result};
use slipgate_testbed::{Guest, World, baseline};

use super::{GUEST_PORT, PORT, copy_loop};
use crate::{
    contender::{Contender, NatProcess, Stand, guest, own_version, version, world},
    machine::Pinning,
};

pub(super) const COPY_LOOP: &str = "copy-loop";

pub(super) fn all() -> Vec<Box<dyn Contender>> {
    vec![
        Box::new(Relay::Slipgate),
        Box::new(Relay::CopyLoop),
        Box::new(Relay::Rinetd),
    ]
}

/// rinetd, with a guest to which the host routes.
pub(crate) fn rinetd() -> Box<dyn Contender> {
    Box::new(Relay::Rinetd)
}

enum Relay {
    Slipgate,
    CopyLoop,
    Rinetd,
}

impl Contender for Relay {
    fn name(&self) -> &'static str {
        match self {
            Self::Slipgate => "slipgate",
            Self::CopyLoop => COPY_LOOP,
            Self::Rinetd => "rinetd",
        }
    }

    fn version(&self) -> Result<String> {
        match self {
            Self::Slipgate => own_version(),
            Self::CopyLoop => Ok("64 KiB, two threads a connection".to_owned()),
            Self::Rinetd => version("rinetd", "rinetd"),
        }
    }

    fn set_up(&self, pinning: Pinning, _ipv6: bool) -> Result<Stand> {
        if let Self::Slipgate = self {
            return by_slipgate(pinning);
        }
        let world = World::with(world(true))?;
        let guest = Guest::new(&world, guest(pinning))?;
        baseline::plain_forwarding(&world, &guest)?;
        let inside = guest.config().address;
        let scratch = tempfile::tempdir().context("make a directory for a configuration")?;
        let command = match self {
            Self::Rinetd => {
                let file = scratch.path().join("rinetd.conf");
                let text = format!("127.0.0.1 {PORT} {inside} {GUEST_PORT}\n");
                fs::write(&file, text).with_context(|| format!("write {}", file.display()))?;
                let mut command = Command::new("rinetd");
                command.arg("-f").arg("-c").arg(file);
                command
            }
            _ => copy_loop::command(
                &format!("127.0.0.1:{PORT}"),
                &format!("{inside}:{GUEST_PORT}"),
            )?,
        };
        let process = NatProcess::start(&world.host, command, pinning)?;
        let mut stand = Stand::in_kernel(world, guest).served_by(process)?;
        stand.keep(scratch);
        Ok(stand)
    }
}

fn by_slipgate(pinning: Pinning) -> Result<Stand> {
    let world = World::with(world(false))?;
    let guest = Guest::new(&world, guest(pinning))?;
    let forward = format!("tcp:{PORT}:{GUEST_PORT}");
    let quota = ["--new-flows-per-second", "100000000"];
    let args = [&["--forward", &forward][..], &quota].concat();
    Stand::attached(world, guest, &args, pinning)
}
