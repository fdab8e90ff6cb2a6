//! A Linux guest: a namespace with a real TCP stack behind a TAP, and the "VMM" between.

use std::{
    net::Ipv4Addr,
    path::{Path, PathBuf},
    process::{Child, Command},
    thread,
    time::{Duration, Instant},
};

use crate::{
    accounting::FlowCounts,
    dhcp::{self, Lease},
    error::{Error, Result, Tried},
    frame::{Mac, with_vnet},
    impairment::Impairment,
    netns::NetNs,
    pump::{Direction, Filter, FrameTap, MovedCounts, Pump, Sides},
    socket_guest::StreamWire,
    tap::{TapOptions, TapQueue, VnetHdr},
    world::World,
};

pub use crate::tap::GUEST_DEVICE;
/// Time limit for the kernel to report that no process has the TAP open.
const UNPLUGGED_WITHIN: Duration = Duration::from_secs(5);
/// Longest wait for room in the socket of a guest that is behind one.
const MOST_WAIT: Duration = Duration::from_secs(30);

/// Configuration of a [`Guest`]. Start from `GuestConfig::new("tap0")`; by default all guests have
/// the same address and MAC.
#[derive(Clone, Debug)]
pub struct GuestConfig {
    /// The TAP in the host namespace.
    pub tap: String,
    /// MAC address of the guest.
    pub mac: Mac,
    /// The address of a static configuration.
    pub address: Ipv4Addr,
    /// Prefix length of a static configuration.
    pub prefix: u8,
    /// The gateway of a static configuration.
    pub gateway: Ipv4Addr,
    /// MTU of `eth0` in bytes. (The host's TAP keeps 1500 unless the test sets it.)
    pub mtu: u32,
    /// Partial checksums and GSO frames, both ways: TUNSETOFFLOAD on both TAPs.
    pub offloads: bool,
    /// Queues of the host's TAP.
    pub queues: usize,
    /// Whether the pump counts flows; off for measurements.
    pub count: bool,
    /// Configure `address` and `gateway` at once. Off: the guest has no address until
    /// [`Guest::dhcp`] or `guest.ns.ip(…)`.
    pub configure: bool,
    /// Whether there is no Linux guest: the test writes and reads the frames.
    pub hand_made: bool,
    /// The stream socket that it is connected to, in place of a TAP of the host's: what QEMU does for
    /// `-netdev stream`. There are no offloads then.
    pub socket: Option<PathBuf>,
    /// Impairment of frames between guest and TAP; a GSO frame is impaired as one.
    pub impairment: Option<Impairment>,
    /// The CPU the pump stays on; `None`: any.
    pub pump_cpu: Option<usize>,
}

impl GuestConfig {
    /// A guest behind `tap` with slipgate's default addresses, configured statically.
    pub fn new(tap: &str) -> Self {
        GuestConfig {
            tap: tap.to_owned(),
            mac: [0x52, 0x54, 0x00, 0x12, 0x34, 0x56],
            address: Ipv4Addr::new(10, 0, 2, 15),
            prefix: 24,
            gateway: Ipv4Addr::new(10, 0, 2, 2),
            mtu: 1500,
            offloads: true,
            queues: 1,
            count: true,
            configure: true,
            hand_made: false,
            socket: None,
            impairment: None,
            pump_cpu: None,
        }
    }

    /// Leaves the guest without an address until it takes a lease.
    pub fn unconfigured(mut self) -> Self {
        self.configure = false;
        self
    }

    /// Connects the guest to a stream socket in place of a TAP.
    pub fn on_socket(mut self, path: &Path) -> Self {
        self.socket = Some(path.to_owned());
        self.offloads = false;
        self
    }

    /// Leaves the guest without a stack: the test writes its frames.
    pub fn hand_made(mut self) -> Self {
        self.hand_made = true;
        self
    }
}

/// A guest. Its TAP is down until slipgate, or a test's `host.ip`, brings it up.
pub struct Guest {
    /// The guest's namespace; empty for a hand-made guest.
    pub ns: NetNs,
    config: GuestConfig,
    host: NetNs,
    stack: Vec<TapQueue>,
    plugged: Option<(Pump, Vec<TapQueue>)>,
    wire: Option<StreamWire>,
}

impl Guest {
    /// Makes the guest and its TAP in `world.host`, and starts the pump between them.
    ///
    /// # Errors
    /// A device, a namespace or the pump cannot be made.
    pub fn new(world: &World, config: GuestConfig) -> Result<Guest> {
        Self::in_host(&world.host, config)
    }

    /// Makes a guest as [`Guest::new`] does, with the TAP in any namespace.
    ///
    /// # Errors
    /// As [`Guest::new`].
    pub fn in_host(host: &NetNs, config: GuestConfig) -> Result<Guest> {
        let ns = NetNs::new(&format!("guest-{}", config.tap))?;
        let stack = match config.hand_made {
            true => Vec::new(),
            false => TapQueue::open(&ns, GUEST_DEVICE, options(&config, 1))?,
        };
        let mut guest = Guest {
            ns,
            host: host.clone(),
            stack,
            plugged: None,
            wire: None,
            config,
        };
        guest.plug()?;
        if !guest.config.hand_made {
            guest.bring_up()?;
        }
        Ok(guest)
    }

    fn bring_up(&self) -> Result<()> {
        let GuestConfig {
            mac: m,
            mtu,
            address,
            prefix,
            gateway,
            ..
        } = &self.config;
        let mac = format!(
            "{:02x}:{:02x}:{:02x}:{:02x}:{:02x}:{:02x}",
            m[0], m[1], m[2], m[3], m[4], m[5]
        );
        self.ns.ip(&format!(
            "link set {GUEST_DEVICE} address {mac} mtu {mtu} up"
        ))?;
        if self.config.configure {
            self.ns
                .ip(&format!("addr add {address}/{prefix} dev {GUEST_DEVICE}"))?;
            self.ns.ip(&format!(
                "route add default via {gateway} dev {GUEST_DEVICE}"
            ))?;
        }
        Ok(())
    }

    /// Returns the configuration of the guest.
    pub fn config(&self) -> &GuestConfig {
        &self.config
    }

    /// The name of its TAP.
    pub fn tap(&self) -> &str {
        &self.config.tap
    }

    /// Runs `f` inside the guest: see [`NetNs::run`].
    pub fn run<T: Send>(&self, f: impl FnOnce() -> T + Send) -> T {
        self.ns.run(f)
    }

    /// Spawns a program inside the guest: see [`NetNs::spawn`].
    ///
    /// # Errors
    /// The program cannot be started.
    pub fn spawn(&self, command: Command) -> Result<Child> {
        self.ns.spawn(command)
    }

    /// Takes a lease by DHCP and applies it: address, route, MTU.
    ///
    /// # Errors
    /// No lease came within `timeout`, or it could not be applied.
    pub fn dhcp(&self, timeout: Duration) -> Result<Lease> {
        let lease = dhcp::acquire(&self.ns, GUEST_DEVICE, self.config.mac, timeout)?;
        dhcp::apply(&self.ns, GUEST_DEVICE, &lease)?;
        Ok(lease)
    }

    /// Closes the TAP, as a VMM that exits does. Returns when the kernel reports that no process has
    /// it open: a child that another test starts meanwhile has copies of the descriptors until its
    /// `exec`.
    pub fn unplug(&mut self) {
        self.plugged = None;
        if self.wire.take().is_some() {
            return;
        }
        let link = format!("-o link show dev {}", self.config.tap);
        let end = Instant::now() + UNPLUGGED_WITHIN;
        let is_carried = || {
            self.host
                .ip(&link)
                .is_ok_and(|link| link.contains("LOWER_UP"))
        };
        while is_carried() && Instant::now() < end {
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// Makes the TAP again, under its name. Does nothing if it exists.
    ///
    /// # Errors
    /// The TAP cannot be made, or the socket cannot be connected.
    pub fn plug(&mut self) -> Result<()> {
        if self.plugged.is_some() {
            return Ok(());
        }
        let config = &self.config;
        let queues = match &config.socket {
            None => TapQueue::open(&self.host, &config.tap, options(config, config.queues))?,
            Some(path) => {
                let [ours, theirs] = TapQueue::pair()?;
                self.wire = Some(StreamWire::connect(path, theirs)?);
                vec![ours]
            }
        };
        let sides = Sides {
            inner: self.stack.clone(),
            outer: queues.clone(),
            ethernet: true,
            count: config.count,
            impairment: config.impairment,
            cpu: config.pump_cpu,
        };
        self.plugged = Some((Pump::start(&config.tap, sides)?, queues));
        Ok(())
    }

    /// Makes the TAP again as another VMM would, which has other offloads and another number of queues. It
    /// has to be unplugged.
    ///
    /// # Errors
    /// As [`Guest::plug`].
    pub fn plug_as(&mut self, offloads: bool, queues: usize) -> Result<()> {
        self.config.offloads = offloads;
        self.config.queues = queues;
        self.plug()
    }

    /// The host TAP's queues, for generators that write frames as a VMM does.
    pub fn queues(&self) -> &[TapQueue] {
        self.plugged.as_ref().map_or(&[], |(_, queues)| queues)
    }

    /// Writes a hand-made frame into the host's TAP (or the socket), as if the guest had sent it.
    ///
    /// # Errors
    /// The kernel refuses the frame (an invalid vnet header: EINVAL; the TAP is down: EIO), or the
    /// guest's socket had no room for it for [`MOST_WAIT`].
    pub fn inject(&self, vnet: VnetHdr, frame: &[u8]) -> Result<()> {
        let tap = &self.config.tap;
        let Some(queue) = self.queues().first() else {
            return Err(Error::unexpected(format!(
                "inject into `{tap}`: it is unplugged"
            )));
        };
        let until = Instant::now() + MOST_WAIT;
        queue
            .write_waiting(&with_vnet(vnet, frame), || Instant::now() > until)
            .tried(format!("write a frame into `{tap}`"))
    }

    /// Returns copies of all frames that pass from now on, in both directions. Injected frames are
    /// not included, because they do not pass the pump.
    ///
    /// # Errors
    /// The guest is unplugged.
    pub fn frames(&self) -> Result<FrameTap> {
        self.pump().map(Pump::subscribe)
    }

    /// Sets the filter that decides about each frame between guest and TAP: drop, repeat, replace.
    ///
    /// # Errors
    /// The guest is unplugged.
    pub fn set_filter(&self, filter: Option<Filter>) -> Result<()> {
        self.pump().map(|pump| pump.set_filter(filter))
    }

    /// Stops or resumes the pump; meanwhile frames wait in the TAPs' queues.
    ///
    /// # Errors
    /// The guest is unplugged.
    pub fn set_paused(&self, paused: bool) -> Result<()> {
        self.pump().map(|pump| pump.set_paused(paused))
    }

    /// Writes all frames that pass from now on to a pcap file.
    ///
    /// # Errors
    /// The file cannot be made, or the guest is unplugged.
    pub fn write_pcap(&self, path: &Path) -> Result<()> {
        self.pump()?.write_pcap(path)
    }

    /// Traffic per flow, counted as if segmented, since the TAP was plugged in. Empty when
    /// unplugged.
    pub fn flows(&self, direction: Direction) -> FlowCounts {
        self.plugged
            .as_ref()
            .map(|(pump, _)| pump.flows(direction))
            .unwrap_or_default()
    }

    /// Frames moved since the TAP was plugged in, and those the other side refused.
    pub fn moved(&self, direction: Direction) -> MovedCounts {
        self.plugged
            .as_ref()
            .map(|(pump, _)| pump.moved(direction))
            .unwrap_or_default()
    }

    fn pump(&self) -> Result<&Pump> {
        let unplugged = || Error::unexpected(format!("the TAP `{}` is unplugged", self.config.tap));
        self.plugged
            .as_ref()
            .map(|(pump, _)| pump)
            .ok_or_else(unplugged)
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        self.ns.kill_processes();
    }
}

fn options(config: &GuestConfig, queues: usize) -> TapOptions {
    TapOptions {
        ethernet: true,
        vnet_hdr: true,
        offloads: config.offloads,
        queues,
    }
}
