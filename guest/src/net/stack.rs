//! One CPU's network stack, and the loop that drives it.

use alloc::{vec, vec::Vec};
use core::{
    cell::Cell,
    sync::atomic::{AtomicU32, Ordering},
};

use smoltcp::{
    iface::{Config, Interface, PollIngressSingleResult, PollResult, SocketHandle, SocketSet},
    phy::{Device, TxToken},
    socket::tcp,
    time::{Duration, Instant},
    wire::{
        ArpOperation, ArpPacket, ArpRepr, EthernetAddress, EthernetFrame, EthernetProtocol, IpCidr,
        Ipv4Cidr,
    },
};

use super::{
    ipv6,
    lease::Lease,
    ports::Ports,
    run_clock::{LONGEST_SLEEP_NS, RunClock},
    steering::{Lanes, Steered},
};
use crate::platform::{Nic, Platform};

/// Number of frames taken in before the workload's next turn.
const FRAMES_A_TURN: usize = 64;
/// Time to wait for a full transmit queue to drain, ns; its interrupt should end the wait before.
/// With a much shorter time, a waiting vCPU never sleeps: KVM polls for 200 µs before it lets the
/// vCPU sleep.
const FULL_RETRY_NS: u64 = 2_000_000;
/// Time without progress after which a connection has failed, ns.
pub const STALL_NS: u64 = 10_000_000_000;

/// Result of a workload's turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn<T> {
    /// The workload is done, with this result.
    Done(T),
    /// The workload wants another turn as soon as the queued data could be sent.
    Worked,
    /// The workload waits for frames, and for this time if there is one.
    Waiting(Option<u64>),
}

/// One CPU's device, interface and sockets.
pub struct Stack<'s, P, N: Nic> {
    /// Platform of the machine.
    pub platform: &'s P,
    /// Number of this CPU.
    pub cpu: usize,
    /// Queue pair, behind its steering.
    pub device: Steered<'s, P, N>,
    /// smoltcp's interface over the device.
    pub interface: Interface,
    /// Sockets of all workloads.
    pub sockets: SocketSet<'static>,
    /// Local ports of this CPU.
    pub ports: Ports,
    lanes: &'s Lanes,
    clock: RunClock<'s>,
    /// The platform's generation at the last look.
    generation: Cell<u64>,
    /// Time of the platform at the first look after a restore, ns.
    restored_ns: Cell<Option<u64>>,
}

impl<'s, P: Platform, N: Nic> Stack<'s, P, N> {
    /// Returns a stack without an address.
    pub fn new(platform: &'s P, nic: N, cpu: usize, lanes: &'s Lanes) -> Self {
        let mut device = Steered::new(nic, cpu, platform, lanes);
        let interface = interface(platform, &mut device, instant(platform.now_ns()));
        let mut random = [0; 2];
        platform.random(&mut random);
        BOOTED_UNIX_MS.store(platform.booted_unix_ms() as u32, Ordering::Relaxed);
        Stack {
            platform,
            cpu,
            device,
            interface,
            sockets: SocketSet::new(Vec::new()),
            ports: Ports::new(cpu, lanes.cpus(), u16::from_le_bytes(random)),
            lanes,
            clock: RunClock::new(&lanes.stops, platform.now_ns()),
            generation: Cell::new(platform.generation()),
            restored_ns: Cell::new(None),
        }
    }

    /// Applies the addresses, routes and MTU of a lease.
    pub fn configure(&mut self, lease: &Lease) {
        let mtus = [lease.mtu, lease.ipv6.and_then(|ipv6| ipv6.mtu)];
        if let Some(mtu) = mtus.into_iter().flatten().min() {
            self.device.limit_mtu(mtu);
        }
        let now = self.tick();
        self.interface = interface(self.platform, &mut self.device, now);
        self.interface.update_ip_addrs(|addresses| {
            // An empty list has room for one.
            let _ = addresses.push(IpCidr::new(lease.address.into(), lease.prefix));
        });
        if let Some(router) = lease.router {
            let routes = self.interface.routes_mut();
            let _ = routes.add_default_ipv4_route(router);
        }
        if let Some(ipv6) = lease.ipv6 {
            let link_local = ipv6::link_local(self.device.nic.mac());
            self.interface.update_ip_addrs(|addresses| {
                // There is room for three.
                let _ = addresses.push(IpCidr::new(link_local.into(), 64));
                let _ = addresses.push(IpCidr::new(ipv6.address.into(), ipv6.prefix));
            });
            let routes = self.interface.routes_mut();
            let _ = routes.add_default_ipv6_route(ipv6.router);
        }
    }

    /// Asks for the MAC addresses of the routers and the resolvers, on behalf of all CPUs: answers go
    /// to each of them. smoltcp by itself asks only when a packet waits, and for one neighbour a second.
    pub fn ask_neighbors(&mut self, lease: &Lease) {
        let own = Ipv4Cidr::new(lease.address, lease.prefix);
        let on_link = lease.router.iter().chain(&lease.dns);
        for target in on_link.filter(|address| own.contains_addr(address)) {
            let source_hardware_addr = EthernetAddress(self.device.nic.mac());
            let request = ArpRepr::EthernetIpv4 {
                operation: ArpOperation::Request,
                source_hardware_addr,
                source_protocol_addr: lease.address,
                target_hardware_addr: EthernetAddress([0; 6]),
                target_protocol_addr: *target,
            };
            let now = self.tick();
            // With a full queue, smoltcp sends the request when it needs the address.
            let Some(token) = self.device.transmit(now) else {
                continue;
            };
            let len = EthernetFrame::<&[u8]>::buffer_len(request.buffer_len());
            token.consume(len, |bytes| {
                let mut frame = EthernetFrame::new_unchecked(bytes);
                frame.set_src_addr(source_hardware_addr);
                frame.set_dst_addr(EthernetAddress::BROADCAST);
                frame.set_ethertype(EthernetProtocol::Arp);
                request.emit(&mut ArpPacket::new_unchecked(frame.payload_mut()));
            });
        }
        self.device.nic.flush();
        if let Some(ipv6) = &lease.ipv6 {
            ipv6::announce(self, ipv6);
        }
    }

    /// Returns the largest size of an IP packet, bytes.
    pub fn mtu(&mut self) -> usize {
        self.device.capabilities().ip_mtu()
    }

    /// Returns the time that the machine has run, ns: the platform's, without hours in which it was
    /// paused.
    pub fn now_ns(&self) -> u64 {
        self.see_generation();
        self.clock.at(self.platform.now_ns())
    }

    /// Returns the time since the first look at the clock after the last restore, ns; `None`: there was no
    /// restore. A CPU looks in each turn, so that is as good as its first instruction.
    pub fn since_restore_ns(&self) -> Option<u64> {
        self.see_generation();
        let restored_ns = self.restored_ns.get()?;
        Some(self.platform.now_ns().saturating_sub(restored_ns))
    }

    fn see_generation(&self) {
        // Before the clock: a machine that is saved between the two looks has a time after the restore.
        let generation = self.platform.generation();
        if self.generation.replace(generation) != generation {
            self.restored_ns.set(Some(self.platform.now_ns()));
        }
    }

    /// Adds a TCP socket with the workloads' settings: no delayed acknowledgements, no Nagle.
    pub fn add_tcp(&mut self, receive_bytes: usize, send_bytes: usize) -> SocketHandle {
        let mut socket = tcp::Socket::new(
            tcp::SocketBuffer::new(vec![0; receive_bytes]),
            tcp::SocketBuffer::new(vec![0; send_bytes]),
        );
        socket.set_ack_delay(None);
        socket.set_nagle_enabled(false);
        socket.set_congestion_control(tcp::CongestionControl::Reno);
        socket.set_timeout(Some(Duration::from_micros(STALL_NS / 1000)));
        self.sockets.add(socket)
    }

    /// Returns a TCP socket.
    pub fn tcp(&mut self, handle: SocketHandle) -> &mut tcp::Socket<'static> {
        self.sockets.get_mut(handle)
    }

    /// Drives the stack until `step` is done, and returns its result. `step` gets a turn between
    /// the received frames and those to send. The data of its last turn is sent before the return.
    pub fn drive<T>(&mut self, step: impl FnMut(&mut Self) -> Turn<T>) -> T {
        self.drive_until(step, || false)
    }

    /// Does what [`Stack::drive`] does for a step that also waits for data from another CPU. That
    /// CPU writes the data and then calls [`Lanes::nudge`]; `ready` returns whether it was written.
    pub fn drive_until<T>(
        &mut self,
        mut step: impl FnMut(&mut Self) -> Turn<T>,
        ready: impl Fn() -> bool,
    ) -> T {
        loop {
            let received = self.take_in();
            let turn = step(self);
            let sent = self.send_out();
            let full = self.device.take_full();
            let until_ns = match turn {
                Turn::Done(result) => return result,
                Turn::Worked if !full => continue,
                // Sending may have changed a socket too: a RST closes it.
                Turn::Waiting(_) if received || (sent && !full) => continue,
                Turn::Worked => None,
                Turn::Waiting(until_ns) => until_ns,
            };
            let now_ns = self.now_ns();
            let timer = self.interface.poll_at(instant(now_ns), &self.sockets);
            let timer_ns = timer.map(|at| (at.total_micros().max(0) as u64) * 1000);
            let until_ns = match [until_ns, timer_ns].into_iter().flatten().min() {
                // Due frames can't be sent.
                _ if full => Some(now_ns + FULL_RETRY_NS),
                Some(until_ns) if until_ns <= now_ns => continue,
                until_ns => until_ns,
            };
            if !self.device.nic.arm() {
                continue;
            }
            // Awake now and then, to find out when the machine did not run.
            let longest_ns = now_ns + LONGEST_SLEEP_NS;
            let until_ns = until_ns.map_or(longest_ns, |until_ns| until_ns.min(longest_ns));
            let until_ns = Some(self.clock.of_platform(until_ns));
            if full {
                // Frames from other CPUs have to wait too, until there is room for an answer.
                self.platform.idle(until_ns);
            } else {
                self.lanes.sleep(self.cpu, self.platform, until_ns, &ready);
            }
        }
    }

    fn take_in(&mut self) -> bool {
        let now = self.tick();
        let mut received = false;
        for _ in 0..FRAMES_A_TURN {
            let result =
                self.interface
                    .poll_ingress_single(now, &mut self.device, &mut self.sockets);
            if result == PollIngressSingleResult::None {
                break;
            }
            received = true;
        }
        received
    }

    /// Sends all that can be sent. Returns whether there was anything to send.
    fn send_out(&mut self) -> bool {
        let now = self.tick();
        let mut sent = false;
        while self
            .interface
            .poll_egress(now, &mut self.device, &mut self.sockets)
            == PollResult::SocketStateChanged
        {
            sent = true;
        }
        self.device.nic.flush();
        sent
    }

    /// Returns the time, and updates the clock of TCP timestamps.
    pub(super) fn tick(&self) -> Instant {
        let now_ns = self.now_ns();
        let now_ms = (now_ns / 1_000_000) as u32;
        if now_ms > TIMESTAMP_MS.load(Ordering::Relaxed) {
            // Not a store: a CPU that was delayed here must not set the clock back for the others,
            // whose segments their peers would then refuse (PAWS).
            TIMESTAMP_MS.fetch_max(now_ms, Ordering::Relaxed);
        }
        instant(now_ns)
    }
}

/// Milliseconds since boot for TCP timestamps: smoltcp calls a plain function for them.
static TIMESTAMP_MS: AtomicU32 = AtomicU32::new(0);

/// Start value of the timestamps: the lower bits of the time of day.
static BOOTED_UNIX_MS: AtomicU32 = AtomicU32::new(0);

/// Returns the clock of TCP timestamps (RFC 7323), ms. With timestamps, a server that holds a tuple
/// in TIME-WAIT accepts a new connection from the same port, whatever its initial sequence number.
/// This must hold across boots: if the clock started at 0 with each boot, the timestamps of a guest
/// that starts soon after another one would seem old (PAWS), and its SYN would have to be sent
/// again after a second.
pub fn timestamp_ms() -> u32 {
    let booted = BOOTED_UNIX_MS.load(Ordering::Relaxed);
    booted.wrapping_add(TIMESTAMP_MS.load(Ordering::Relaxed))
}

fn instant(now_ns: u64) -> Instant {
    Instant::from_micros((now_ns / 1000) as i64)
}

fn interface<P: Platform, N: Nic>(
    platform: &P,
    device: &mut Steered<'_, P, N>,
    now: Instant,
) -> Interface {
    let mut config = Config::new(EthernetAddress(device.nic.mac()).into());
    let mut seed = [0; 8];
    platform.random(&mut seed);
    config.random_seed = u64::from_le_bytes(seed);
    Interface::new(config, device, now)
}

#[cfg(test)]
#[path = "stack_test.rs"]
mod tests;
