//! `slipgate serve`, controlled by its API.
use std::{fs, net::Ipv4Addr, path::Path, time::Duration};

use anyhow::{Context as _, Result, bail, ensure};
use slipgate_testbed::{NetNs, PinDir, Slipgate, World, clients::api::ApiClient, world::UPLINK};

use super::{Fleet, IDLE, LINK_EVENT, MEMORY};
use crate::{contender::world, workload::Sample};

pub(super) const NAME: &str = "slipgate";

/// Address of all its guests.
pub(crate) const GUEST: Ipv4Addr = Ipv4Addr::new(10, 0, 2, 15);

/// Time for which the idle daemon's CPU time is measured.
const IDLE_FOR: Duration = Duration::from_secs(12);
/// Number of link events that the measurement causes.
const EVENTS: u32 = 40;
/// A tick of `/proc/PID/stat`, µs (`USER_HZ` is 100 on every Linux).
const TICK_US: f64 = 10_000.0;

/// The daemon and a connection to its API. The order of the fields is the order in which they are
/// dropped.
pub(crate) struct Daemon {
    api: ApiClient,
    slipgate: Slipgate,
    _scratch: tempfile::TempDir,
}

impl Daemon {
    pub(super) fn start() -> Result<(World, Self)> {
        let world = World::with(world(false))?;
        let daemon = Self::serve(&world, &[])?;
        Ok((world, daemon))
    }

    /// Starts a daemon with these flags too.
    pub(crate) fn serve(world: &World, flags: &[&str]) -> Result<Self> {
        let scratch = tempfile::tempdir().context("make a directory for a socket")?;
        let socket = scratch.path().join("api.sock");
        let api = socket.display().to_string();
        let args = ["--uplink", UPLINK, "--api", &api, "--log", "warn"];
        let args = [&args[..], flags].concat();
        let slipgate = Slipgate::serve(&world.host, &PinDir::new()?, &args)?;
        Ok(Self {
            api: ApiClient::connect(&socket)?,
            slipgate,
            _scratch: scratch,
        })
    }

    /// Stops it, and starts it again: VMs and flows are kept.
    pub(super) fn restart(&mut self) -> Result<()> {
        let status = self.slipgate.stop()?;
        ensure!(
            status.success(),
            "it ended with {status}:\n{}",
            self.slipgate.stderr()
        );
        self.slipgate = self.slipgate.again()?;
        Ok(())
    }

    /// Returns the process ids of the engines.
    pub(crate) fn engines(&self) -> Vec<u32> {
        self.slipgate.children_named("slipgate-engine")
    }

    /// Runs `slipgate stats --json` and returns its answer.
    pub(crate) fn stats(&self) -> Result<serde_json::Value> {
        Ok(self.slipgate.stats()?)
    }

    /// Makes a request that is to be carried out.
    pub(crate) fn ask(&mut self, method: &str, path: &str, body: &str) -> Result<()> {
        let answer = self.api.ask(method, path, body)?;
        if !answer.is_success() {
            bail!("{method} {path}: {}: {}", answer.status, answer.body);
        }
        Ok(())
    }

    /// Runs `slipgate COMMAND…` about it to its end.
    pub(crate) fn run(&self, command: &[&str]) -> Result<()> {
        self.slipgate.run(command)?;
        Ok(())
    }

    /// Directory that has its pins, one sub-directory for each network namespace.
    pub(crate) fn pins(&self) -> &Path {
        self.slipgate.pins().path()
    }

    fn processes(&self) -> Vec<u32> {
        let children = self.slipgate.children_named("slipgate");
        [self.slipgate.broker_pid()]
            .into_iter()
            .chain(children)
            .collect()
    }

    /// Returns the CPU time of all processes since their start, µs.
    fn cpu_us(&self) -> Result<f64> {
        let ticks = self.processes().into_iter().map(|pid| {
            let path = format!("/proc/{pid}/stat");
            let text = fs::read_to_string(&path).with_context(|| format!("read {path}"))?;
            let rest = text
                .rsplit_once(") ")
                .context("a process without a name")?
                .1;
            let fields: Vec<&str> = rest.split(' ').collect();
            // utime and stime are fields 14 and 15 (proc_pid_stat(5)), 12 and 13 behind the name.
            Ok(fields[11].parse::<f64>()? + fields[12].parse::<f64>()?)
        });
        Ok(ticks.sum::<Result<f64>>()? * TICK_US)
    }

    /// Returns the memory of all processes without the mapped tables, MiB.
    fn memory_mib(&self) -> Result<f64> {
        let each = self.processes().into_iter().map(|pid| {
            let path = format!("/proc/{pid}/smaps_rollup");
            own_kib(Path::new(&path)).map(|kib| kib / 1_024.0)
        });
        each.sum()
    }
}

/// Returns a process's anonymous memory plus its share of file-backed memory, KiB.
pub(crate) fn own_kib(smaps_rollup: &Path) -> Result<f64> {
    let what = || format!("read {}", smaps_rollup.display());
    let text = fs::read_to_string(smaps_rollup).with_context(what)?;
    let field = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name));
        line.and_then(|rest| rest.trim().trim_end_matches(" kB").parse::<f64>().ok())
            .unwrap_or_default()
    };
    Ok(field("Pss_Anon:") + field("Pss_File:"))
}

impl Fleet for Daemon {
    fn add(&mut self, _: &NetNs, tap: &str) -> Result<()> {
        let body = format!("{{\"tap\": \"{tap}\"}}");
        self.ask("PUT", &format!("/v1/vms/{tap}"), &body)
    }

    fn remove(&mut self, _: &NetNs, tap: &str) -> Result<()> {
        self.ask("DELETE", &format!("/v1/vms/{tap}"), "")
    }

    fn cost(&self, host: &NetNs) -> Result<Sample> {
        let before = self.cpu_us()?;
        std::thread::sleep(IDLE_FOR);
        let idle_us = self.cpu_us()? - before;
        let before = self.cpu_us()?;
        for event in 0..EVENTS / 2 {
            let lines = format!("tuntap add other{event} mode tap\nlink del other{event}\n");
            host.batch("ip", &lines)?;
        }
        // The last of them is followed a moment later.
        std::thread::sleep(Duration::from_millis(300));
        let events_us = self.cpu_us()? - before;
        Ok(Sample::of(&[
            (MEMORY, self.memory_mib()?),
            (IDLE, idle_us / IDLE_FOR.as_secs_f64() / 1e4),
            (LINK_EVENT, events_us / f64::from(EVENTS)),
        ]))
    }
}
