//! slipgate in hybrid mode, with its quotas out of the way.

use std::{fs, process::Command};

use anyhow::{Context, Result, bail};
use slipgate_testbed::{Guest, PinDir, World, slipgate, world::UPLINK};

use super::{Contender, Stand, guest, process, world};
use crate::conditions::Pinning;

/// Quotas are policy: none of them may be what is measured.
const QUOTAS: [&str; 6] = [
    "--flow-table",
    "262144",
    "--max-flows",
    "262144",
    "--new-flows-per-second",
    "100000000",
];

/// Rules by address and names that are refused, of the contender with a policy. None is about what
/// the workloads do: what they cost is looking for one.
const RULES: u32 = 1_000;
const NAMES: u32 = 10_000;

pub(super) struct Slipgate {
    pub(super) policy: bool,
}

impl Contender for Slipgate {
    fn name(&self) -> &'static str {
        match self.policy {
            true => "slipgate-policy",
            false => "slipgate",
        }
    }

    fn version(&self) -> Result<String> {
        let output = Command::new(slipgate::binary()?)
            .arg("--version")
            .output()
            .context("run `slipgate --version`")?;
        if !output.status.success() {
            bail!("`slipgate --version` ended with {}", output.status);
        }
        Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
    }

    fn set_up(&self, pinning: Pinning) -> Result<Stand> {
        let world = World::with(world(false))?;
        let guest = Guest::new(&world, guest(pinning))?;
        let pins = PinDir::new()?;
        let mut args = vec!["--tap", guest.tap(), "--uplink", UPLINK];
        args.extend(["--mode", "hybrid", "--log", "warn"]);
        args.extend(QUOTAS);
        let names = tempfile::tempdir().context("make a directory for a deny file")?;
        let file = names.path().join("names.txt").display().to_string();
        let rules: Vec<String> = (0..RULES)
            .map(|i| format!("100.{}.{}.0/24:{}", i / 250, i % 250, 1 + i))
            .collect();
        if self.policy {
            let lines: String = (0..NAMES)
                .map(|i| format!("n{i}.denied{}.test\n", i % 100))
                .collect();
            fs::write(&file, lines).with_context(|| format!("write {file}"))?;
            args.extend(rules.iter().flat_map(|rule| ["--deny", rule]));
            args.extend(["--deny-file", &file]);
        }
        let mut slipgate = slipgate::Slipgate::attach(&world.host, &pins, &args)?;
        process::pin(slipgate.broker_pid(), pinning.middle)?;
        let engine = slipgate.engine_pid().context("slipgate has no engine")?;
        process::pin(engine, pinning.middle)?;
        Ok(Stand::in_kernel(world, guest).under_slipgate(slipgate, engine))
    }
}
