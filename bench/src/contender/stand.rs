//! A contender that is set up: its world, its guest, and access to the guest's link.

use std::{
    fs,
    net::{IpAddr, Ipv4Addr},
    os::unix::fs::MetadataExt,
    path::PathBuf,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use serde_json::Value;
use slipgate_testbed::{
    GUEST_DEVICE, Guest, NetNs, PinDir, Slipgate, World, frame::Mac, world::UPLINK,
};

use super::process::{self, NatProcess, Scheduled};
use crate::{family::Family, injector::Injector, machine::Pinning};

const START_TIMEOUT: Duration = Duration::from_secs(5);

/// A guest that reaches the world. Dropping it removes all its devices, namespaces and processes.
pub(crate) struct Stand {
    // Programs go before what they stand on.
    process: Option<NatProcess>,
    slipgate: Option<(Slipgate, u32)>,
    /// Process that does the work, if it is not `process` itself.
    worker: Option<u32>,
    guest: Option<Guest>,
    guest_ns: NetNs,
    /// Name of the guest's device.
    device: &'static str,
    pub(crate) world: World,
    /// Directory of the files that a process reads while it runs.
    scratch: Option<tempfile::TempDir>,
    /// Destinations of new flows of IPv4; those of the world's first server if there are none.
    new_flows_to: Vec<IpAddr>,
}

/// The guest's addresses on its link.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Link {
    pub(crate) address: IpAddr,
    pub(crate) mac: Mac,
    pub(crate) gateway_mac: Mac,
}

impl Stand {
    /// Returns a guest whose frames come through a TAP and are forwarded by the kernel.
    pub(crate) fn in_kernel(world: World, guest: Guest) -> Stand {
        Stand {
            process: None,
            slipgate: None,
            worker: None,
            device: GUEST_DEVICE,
            guest_ns: guest.ns.clone(),
            guest: Some(guest),
            world,
            scratch: None,
            new_flows_to: Vec::new(),
        }
    }

    /// Adds the process that provides the NAT, and waits until traffic passes.
    ///
    /// # Errors
    /// No traffic passes in time, or the process ends.
    pub(crate) fn served_by(mut self, process: NatProcess) -> Result<Stand> {
        self.process = Some(process);
        // It has no way to say that it is ready but traffic.
        self.await_process(|_| Ok(true))?;
        Ok(self)
    }

    /// Returns a guest that `slipgate attach` serves in hybrid mode, with the further arguments
    /// `args`.
    pub(crate) fn attached(
        world: World,
        guest: Guest,
        args: &[&str],
        pinning: Pinning,
    ) -> Result<Stand> {
        let mut all = vec!["--tap", guest.tap(), "--uplink", UPLINK];
        all.extend(["--mode", "hybrid", "--log", "warn"]);
        all.extend(args);
        let mut slipgate = Slipgate::attach(&world.host, &PinDir::new()?, &all)?;
        process::pin(slipgate.broker_pid(), pinning.middle)?;
        let engine = slipgate.engine_pid().context("slipgate has no engine")?;
        process::pin(engine, pinning.middle)?;
        let mut stand = Stand::in_kernel(world, guest);
        stand.slipgate = Some((slipgate, engine));
        Ok(stand)
    }

    /// Sets the destinations of new flows of IPv4, used in turn, in place of the world's first
    /// server.
    pub(crate) fn with_new_flows_to(mut self, addresses: Vec<Ipv4Addr>) -> Self {
        self.new_flows_to = addresses.into_iter().map(IpAddr::from).collect();
        self
    }

    /// Returns the destinations of new flows, used in turn.
    pub(crate) fn new_flows_to(&self, family: Family) -> Vec<IpAddr> {
        match (family, &self.new_flows_to[..]) {
            (Family::Ipv6, _) | (_, []) => vec![family.server()],
            (Family::Ipv4, addresses) => addresses.to_vec(),
        }
    }

    /// Returns a guest that has no device: a process reaches it by a socket in its namespace.
    pub(crate) fn of_process_without_device(
        world: World,
        guest_ns: NetNs,
        process: NatProcess,
    ) -> Result<Stand> {
        let mut stand = Stand::of(world, (guest_ns, GUEST_DEVICE), process);
        stand.await_process(|_| Ok(true))?;
        Ok(stand)
    }

    /// Keeps a temporary directory until the stand is dropped.
    pub(crate) fn keep(&mut self, scratch: tempfile::TempDir) {
        self.scratch = Some(scratch);
    }

    /// Returns a guest whose device a process creates, configures and serves.
    pub(super) fn of_process(world: World, guest_ns: NetNs, process: NatProcess) -> Result<Stand> {
        let mut stand = Stand::of(world, (guest_ns, GUEST_DEVICE), process);
        stand.await_process(|ns| Ok(ns.ip("route show default")?.contains(GUEST_DEVICE)))?;
        Ok(stand)
    }

    /// Returns a guest that a process made, with the device `device`, and that its child `worker` serves.
    ///
    /// # Errors
    /// The process ends, or the guest has no network in time.
    pub(crate) fn of_child(
        world: World,
        (guest_ns, device): (NetNs, &'static str),
        process: NatProcess,
        worker: u32,
    ) -> Result<Stand> {
        let mut stand = Stand::of(world, (guest_ns, device), process);
        stand.worker = Some(worker);
        stand.await_process(|ns| Ok(ns.ip("route show default")?.contains(device)))?;
        process::pin(worker, stand.process.as_ref().and_then(NatProcess::cpu))?;
        Ok(stand)
    }

    /// A guest that a process serves, which may not be ready yet.
    fn of(world: World, (guest_ns, device): (NetNs, &'static str), process: NatProcess) -> Stand {
        Stand {
            process: Some(process),
            slipgate: None,
            worker: None,
            device,
            guest: None,
            guest_ns,
            world,
            scratch: None,
            new_flows_to: Vec::new(),
        }
    }

    fn await_process(&mut self, ready: impl Fn(&NetNs) -> Result<bool>) -> Result<()> {
        let Some(process) = &mut self.process else {
            return Ok(());
        };
        let deadline = Instant::now() + START_TIMEOUT;
        loop {
            process.check()?;
            if ready(&self.guest_ns)? {
                return process.pin();
            }
            if Instant::now() > deadline {
                bail!("the guest has no network {} s on", START_TIMEOUT.as_secs());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Waits until the guest is sure of an IPv6 address and has a route.
    ///
    /// # Errors
    /// It is not in time.
    pub(super) fn await_ipv6(&self) -> Result<()> {
        let deadline = Instant::now() + START_TIMEOUT;
        let address = format!("-6 address show dev {GUEST_DEVICE} scope global -tentative");
        while !self.guest_ns.ip(&address)?.contains("inet6")
            || !self
                .guest_ns
                .ip("-6 route show default")?
                .contains(GUEST_DEVICE)
        {
            if Instant::now() > deadline {
                bail!("the guest has no IPv6 {} s on", START_TIMEOUT.as_secs());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    /// Sets TCP's congestion control for later connections of the guest, the host and the world.
    pub(crate) fn set_congestion_control(&self, name: &str) -> Result<()> {
        self.guest_ns.set_congestion_control(name)?;
        Ok(self.world.set_congestion_control(name)?)
    }

    /// Returns the guest's namespace.
    pub(crate) fn guest_ns(&self) -> &NetNs {
        &self.guest_ns
    }

    /// Runs `f` in the guest.
    pub(crate) fn in_guest<T: Send>(&self, f: impl FnOnce() -> T + Send) -> T {
        self.guest_ns.run(f)
    }

    /// Returns a writer of frames: by the TAP, as the guest's VMM, or by the guest's device where
    /// there is no VMM.
    pub(crate) fn injector(&self) -> Result<Injector> {
        match self.guest.as_ref().and_then(|guest| guest.queues().first()) {
            Some(queue) => Ok(Injector::Tap(queue.clone())),
            None => Injector::on_device(&self.guest_ns, self.device),
        }
    }

    /// Returns the addresses of the guest, and of its gateway after an exchange with the world.
    pub(crate) fn link(&self, family: Family) -> Result<Link> {
        let (flag, device) = (family.flag(), self.device);
        let text = self.guest_ns.ip(&format!(
            "-json {flag} address show dev {device} scope global"
        ))?;
        let addresses: Value = serde_json::from_str(&text).context("`ip -json address`")?;
        let text = self
            .guest_ns
            .ip(&format!("-json {flag} neigh show dev {device}"))?;
        let neighbours: Value = serde_json::from_str(&text).context("`ip -json neigh`")?;
        let rows = |table: &Value| table.as_array().cloned().unwrap_or_default();
        let local = rows(&addresses);
        let local = local
            .iter()
            .find_map(|row| row.pointer("/addr_info/0/local"));
        // By IPv6 there may be a neighbour that was not found, too.
        let neighbours = rows(&neighbours);
        let gateway = neighbours.iter().find_map(|row| row.get("lladdr"));
        let text = self
            .guest_ns
            .ip(&format!("-json link show dev {}", self.device))?;
        let link: Value = serde_json::from_str(&text).context("`ip -json link`")?;
        Ok(Link {
            address: local
                .and_then(|text| text.as_str()?.parse().ok())
                .context("the guest has no address")?,
            mac: mac(link.pointer("/0/address")).context("the guest's device has no MAC")?,
            gateway_mac: mac(gateway).context("the guest has not found its gateway")?,
        })
    }

    /// Returns the directory of slipgate's pinned programs and maps, named after the inode number
    /// of its network namespace; `None` if slipgate does not serve the stand.
    pub(crate) fn pins(&self) -> Result<Option<PathBuf>> {
        let Some((slipgate, _)) = &self.slipgate else {
            return Ok(None);
        };
        let path = self.world.host.path();
        let namespace =
            fs::metadata(&path).with_context(|| format!("look at {}", path.display()))?;
        let pins = slipgate.pins().path().join(namespace.ino().to_string());
        Ok(Some(pins))
    }

    /// Returns the output of `slipgate stats`; `None` if slipgate does not serve the stand.
    pub(crate) fn slipgate_stats(&self) -> Result<Option<Value>> {
        let stats = self.slipgate.as_ref().map(|(slipgate, _)| slipgate.stats());
        Ok(stats.transpose()?)
    }

    /// Returns the process that decides about flows: slipgate's engine, pasta or slirp4netns;
    /// `None` if the kernel decides.
    pub(crate) fn decider(&self) -> Option<u32> {
        let engine = self.slipgate.as_ref().map(|(_, engine)| *engine);
        let process = self.process.as_ref().map(NatProcess::pid);
        engine.or(self.worker).or(process)
    }

    /// Returns the run and wait times of the deciding process; `None` if there is none.
    pub(crate) fn decider_scheduled(&self) -> Result<Option<Scheduled>> {
        self.decider().map(process::scheduled).transpose()
    }

    /// Stops the deciding process while other contenders are measured, or lets it continue: its
    /// remaining work (its queue, thousands of flows) would otherwise slow them down. slipgate's
    /// broker is stopped before the engine and continues after it, because it would replace an
    /// engine that does not answer.
    pub(crate) fn hold(&self, held: bool) -> Result<()> {
        let broker = self.slipgate.as_ref().map(|(s, _)| s.broker_pid());
        let parent = self.worker.and(self.process.as_ref().map(NatProcess::pid));
        let parents = broker.into_iter().chain(parent);
        let mut pids: Vec<u32> = parents.chain(self.decider()).collect();
        if !held {
            pids.reverse();
        }
        pids.into_iter()
            .try_for_each(|pid| process::hold(pid, held))
    }

    /// Ends the contender's processes in order.
    ///
    /// # Errors
    /// slipgate fails to end in order.
    pub(crate) fn tear_down(mut self) -> Result<()> {
        self.hold(false)?;
        if let Some((mut slipgate, _)) = self.slipgate.take() {
            let status = slipgate.stop()?;
            if !status.success() {
                bail!("slipgate ended with {status}:\n{}", slipgate.stderr());
            }
        }
        Ok(())
    }
}

fn mac(text: Option<&Value>) -> Option<Mac> {
    let mut bytes = text?
        .as_str()?
        .split(':')
        .map(|byte| u8::from_str_radix(byte, 16));
    let mut out = [0; 6];
    for byte in &mut out {
        *byte = bytes.next()?.ok()?;
    }
    Some(out)
}
