//! A daemon whose VMs have as many flows as are asked for.
use std::{
    fs,
    net::{IpAddr, SocketAddr},
    os::{fd::AsRawFd as _, unix::fs::MetadataExt as _},
    path::PathBuf,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use slipgate_control::SharedMaps;
use slipgate_testbed::{
    NetNs, World, affinity, baseline,
    servers::{UdpServer, UdpService},
    signal,
    tap::TapQueue,
    world::GATEWAY_MAC,
};

use crate::{
    contender::{self, Link, scheduled},
    family::Family,
    fleet::{
        crowd::GUEST_MAC,
        daemon::{Daemon, GUEST, own_kib},
    },
    generator::{Arrivals, drop_on_arrival},
    guest_frames::{Kind, frame},
    injector::Injector,
    machine::Pinning,
    workload::new_flows::offer,
};

/// VMs that have the flows.
const VMS: usize = 50;
/// Room for two million: a quarter is kept for owners that hold little.
const SLOTS: &str = "2097152";
/// Flows are to ports from this one on. Each VM has as many as it has flows.
const FIRST_PORT: u16 = 10_000;
/// Ports of flows whose admission is timed.
const TIMED: std::ops::Range<u16> = 30_000..50_000;
/// Port of the world that counts the first packets after the engine was killed.
const PROBED: u16 = 4_100;
/// Time between two of these.
const PACE: Duration = Duration::from_millis(2);
const BACK_WITHIN: Duration = Duration::from_secs(20);
/// Time for which the idle engine is observed.
const IDLE_FOR: Duration = Duration::from_secs(3);
/// Time between two looks at whether a new engine still adopts.
const LOOK: Duration = Duration::from_millis(200);
const PAYLOAD: [u8; 22] = [0x5a; 22];
const QUOTAS: &str = "{\"max_flows\": 100000, \"new_flows_per_second\": 1000000}";
const POLICY: &str = "/v1/policies/scale";

/// The daemon with its VMs. The order of the fields is the order in which they are dropped.
pub(super) struct Subject {
    daemon: Daemon,
    taps: Vec<TapQueue>,
    /// Counts what arrives at [`PROBED`].
    probed: UdpServer<IpAddr>,
    world: World,
    family: Family,
    /// Frames of a VM's flows, the same for each VM.
    frames: Vec<Vec<u8>>,
    /// Flows that the VMs have.
    flows: usize,
    /// Number of probes, of policies put, and of VMs added for the timed admission.
    probes: u16,
    policies: usize,
    added: usize,
}

/// Results at one number of flows: the values, in the order of the metrics behind the programs' and
/// the floors'.
pub(super) struct Measured {
    pub(super) values: Vec<f64>,
    pub(super) details: Vec<(&'static str, f64)>,
}

impl Subject {
    /// Starts a daemon with 50 VMs that have no flow.
    pub(super) fn new(family: Family, pinning: Pinning) -> Result<Self> {
        let world = World::with(contender::world(false))?;
        let mut flags = vec!["--flow-table", SLOTS];
        if family == Family::Ipv6 {
            world.give_ipv6()?;
            flags.extend(["--ipv6", "nat"]);
        }
        let daemon = affinity::on_cpu(pinning.middle, || Daemon::serve(&world, &flags))?;
        drop_on_arrival(
            &world.net,
            &format!("udp dport {FIRST_PORT}-{}", TIMED.end - 1),
        )?;
        let at = (family.server(), PROBED);
        let probed = UdpServer::start(&world.net, at, UdpService::Sink)?;
        let mut subject = Self {
            daemon,
            taps: Vec::new(),
            probed,
            world,
            family,
            frames: Vec::new(),
            flows: 0,
            probes: 0,
            policies: 0,
            added: 0,
        };
        subject.change_policy()?;
        for number in 0..VMS {
            let tap = subject.add_vm(&format!("scale{number}"))?;
            subject.taps.push(tap);
        }
        let most = TIMED.start - FIRST_PORT;
        subject.frames = (0..most)
            .map(|number| subject.first_packet(FIRST_PORT + number))
            .collect();
        Ok(subject)
    }

    pub(super) fn host(&self) -> &NetNs {
        &self.world.host
    }

    /// Directory of the daemon's pinned programs and maps.
    pub(super) fn pins(&self) -> Result<PathBuf> {
        let namespace = fs::metadata(self.world.host.path()).context("look at the namespace")?;
        Ok(self.daemon.pins().join(namespace.ino().to_string()))
    }

    fn add_vm(&mut self, name: &str) -> Result<TapQueue> {
        let tap = TapQueue::alone(&self.world.host, name)?;
        let body = format!("{{\"tap\": \"{name}\", \"policy\": \"scale\", \"quotas\": {QUOTAS}}}");
        let path = format!("/v1/vms/{name}");
        self.daemon.ask("PUT", &path, &body)?;
        Ok(tap)
    }

    /// Puts another version of the VMs' policy.
    fn change_policy(&mut self) -> Result<Duration> {
        self.policies += 1;
        let text = format!(
            "default = \"allow\"\nrules = [{{ deny = \"192.0.2.0/24:{}\" }}]\n",
            self.policies
        );
        let began = Instant::now();
        self.daemon.ask("PUT", POLICY, &text)?;
        Ok(began.elapsed())
    }

    /// First packet of a guest's flow to the world's server, from and to this port.
    fn first_packet(&self, port: u16) -> Vec<u8> {
        self.packet(port, port)
    }

    fn packet(&self, from: u16, to: u16) -> Vec<u8> {
        let link = Link {
            address: self.family.of(IpAddr::from(GUEST), baseline::GUEST6.into()),
            mac: GUEST_MAC,
            gateway_mac: GATEWAY_MAC,
        };
        let to = SocketAddr::new(self.family.server(), to);
        frame(link, from, to, Kind::Udp(&PAYLOAD))
    }

    fn engine(&self) -> Result<u32> {
        match self.daemon.engines()[..] {
            [engine] => Ok(engine),
            ref engines => bail!("there is not one engine: {engines:?}"),
        }
    }

    fn admitted(&self) -> Result<u64> {
        let stats = self.daemon.stats()?;
        let admitted = stats.pointer("/total/admitted");
        let admitted = admitted.and_then(serde_json::Value::as_u64);
        admitted.context("`slipgate stats` does not count admissions")
    }

    /// Makes flows until there are so many, and measures with them.
    pub(super) fn measure(&mut self, flows: usize) -> Result<Measured> {
        let filled = self.fill(flows)?;
        let engine = self.engine()?;
        let idle = {
            std::thread::sleep(LOOK);
            let before = scheduled(engine)?.ran;
            std::thread::sleep(IDLE_FOR);
            (scheduled(engine)?.ran - before).as_secs_f64() / IDLE_FOR.as_secs_f64() * 100.0
        };
        let rollup = format!("/proc/{engine}/smaps_rollup");
        let memory_mib = own_kib(rollup.as_ref())? / 1_024.0;
        let shown = self.time(&["flows"])?;
        let stats = self.time(&["stats"])?;
        let changed = self.change_policy()?;
        let (per_cpu_second, per_second, removed) = self.timed_admission()?;
        let (again, adoption) = self.kill_engine()?;
        let ms = |time: Duration| time.as_secs_f64() * 1e3;
        Ok(Measured {
            values: vec![
                per_cpu_second,
                per_second,
                idle,
                memory_mib,
                ms(shown),
                ms(stats),
                ms(changed),
                ms(again),
                ms(adoption),
            ],
            details: vec![
                ("fill_s", filled.as_secs_f64()),
                ("maps_mib", self.maps_mib()?),
                ("vm_with_20000_flows_removed_ms", ms(removed)),
            ],
        })
    }

    /// Has each VM open flows until all have so many.
    fn fill(&mut self, flows: usize) -> Result<Duration> {
        let began = Instant::now();
        let arrivals = Arrivals::at(&self.world.net)?;
        let before = self.admitted()?;
        let each = self.flows / VMS..flows / VMS;
        for tap in &self.taps {
            let injector = Injector::Tap(tap.clone());
            let frames = &self.frames[each.clone()];
            // On a busy machine some frames are lost.
            for _ in 0..2 {
                let limit = Duration::from_secs(30);
                offer(&arrivals, frames.len(), limit, |at| {
                    injector.write(&frames[at])
                })?;
            }
        }
        let (new, wanted) = (self.admitted()? - before, (flows - self.flows) as u64);
        ensure!(
            new * 100 > 99 * wanted,
            "only {new} of {wanted} flows were made"
        );
        self.flows = flows;
        Ok(began.elapsed())
    }

    /// Returns the time that a command takes.
    fn time(&self, command: &[&str]) -> Result<Duration> {
        let began = Instant::now();
        self.daemon.run(command)?;
        Ok(began.elapsed())
    }

    /// Admits flows of one more VM, and removes it. Returns the rates in thousands, by the engine's
    /// CPU time and by the clock, and the time of the removal.
    fn timed_admission(&mut self) -> Result<(f64, f64, Duration)> {
        let name = format!("timed{}", self.added);
        self.added += 1;
        let tap = self.add_vm(&name)?;
        let frames: Vec<_> = TIMED.map(|port| self.first_packet(port)).collect();
        let injector = Injector::Tap(tap.clone());
        let arrivals = Arrivals::at(&self.world.net)?;
        let engine = self.engine()?;
        let before = scheduled(engine)?.ran;
        let limit = Duration::from_secs(5);
        let offered = offer(&arrivals, frames.len(), limit, |at| {
            injector.write(&frames[at])
        })?;
        let ran = scheduled(engine)?.ran - before;
        let arrived = offered.arrived as f64 / 1e3;
        let began = Instant::now();
        self.daemon.ask("DELETE", &format!("/v1/vms/{name}"), "")?;
        let removed = began.elapsed();
        Ok((
            arrived / ran.as_secs_f64(),
            arrived / offered.took.as_secs_f64(),
            removed,
        ))
    }

    /// Kills the engine. Returns the time until a new flow is admitted, and the CPU time that the
    /// next engine takes until it has nothing to do. The first is with what the daemon waits before
    /// it starts another engine: nothing at the first end within a minute, and 0.1, 0.5 and 1 s at
    /// the further ones, which are those of the larger sizes.
    fn kill_engine(&mut self) -> Result<(Duration, Duration)> {
        let (old, before) = (self.engine()?, self.probed.datagrams());
        let injector = Injector::Tap(self.taps[0].clone());
        signal(old, libc::SIGKILL);
        let began = Instant::now();
        while self.probed.datagrams() == before {
            ensure!(
                began.elapsed() < BACK_WITHIN,
                "no flow is admitted {} s after the engine was killed",
                BACK_WITHIN.as_secs()
            );
            self.probes += 1;
            injector.write(&self.packet(50_000 + self.probes % 15_000, PROBED))?;
            std::thread::sleep(PACE);
        }
        let again = began.elapsed();
        let new = self.engine()?;
        let mut ran = scheduled(new)?.ran;
        loop {
            std::thread::sleep(LOOK);
            let now = scheduled(new)?.ran;
            // On a busy machine it may not have had the CPU, but then it waited for it.
            if now - ran < LOOK / 20 || began.elapsed() > BACK_WITHIN {
                return Ok((again, now));
            }
            ran = now;
        }
    }

    /// Memory of all maps, by the kernel's own account, MiB.
    fn maps_mib(&self) -> Result<f64> {
        let maps = SharedMaps::open_pinned(&self.pins()?)?;
        let each = maps.fds().into_iter().map(|fd| {
            let path = format!("/proc/self/fdinfo/{}", fd.as_raw_fd());
            let text = fs::read_to_string(&path).with_context(|| format!("read {path}"))?;
            let line = text.lines().find_map(|line| line.strip_prefix("memlock:"));
            let bytes = line.and_then(|bytes| bytes.trim().parse::<f64>().ok());
            bytes.context("a map without its memory")
        });
        Ok(each.sum::<Result<f64>>()? / f64::from(1 << 20))
    }
}
