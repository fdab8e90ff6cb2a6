//! One CPU's stack, and the loop that drives it.

use alloc::{vec, vec::Vec};
use core::sync::atomic::{AtomicU32, Ordering};

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
    lease::Lease,
    ports::Ports,
    steering::{Lanes, Steered},
};
use crate::platform::{Nic, Platform};

/// Frames taken in before the workload has a look at what they brought.
const FRAMES_A_TURN: usize = 64;
/// How long to wait for a full transmit queue to drain: its interrupt should end the wait before.
/// Much shorter, and a vCPU that waits never sleeps: KVM looks for 200 µs before it lets it.
const FULL_RETRY_NS: u64 = 2_000_000;
/// A connection on which nothing comes for so long has failed.
pub const STALL_NS: u64 = 10_000_000_000;

/// What a workload has to say after its turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn<T> {
    /// It is over, with this.
    Done(T),
    /// It wants another turn as soon as what is queued could be sent.
    Worked,
    /// It waits for frames, and for this time if there is one.
    Waiting(Option<u64>),
}

/// One CPU's device, interface and sockets.
pub struct Stack<'s, P, N: Nic> {
    /// The machine.
    pub platform: &'s P,
    /// Which CPU this is.
    pub cpu: usize,
    /// The queue pair behind its steering.
    pub device: Steered<'s, P, N>,
    /// The interface.
    pub interface: Interface,
    /// All sockets.
    pub sockets: SocketSet<'static>,
    /// This CPU's local ports.
    pub ports: Ports,
    lanes: &'s Lanes,
}

impl<'s, P: Platform, N: Nic> Stack<'s, P, N> {
    /// A stack without an address.
    pub fn new(platform: &'s P, nic: N, cpu: usize, lanes: &'s Lanes) -> Self {
        let mut device = Steered::new(nic, cpu, platform, lanes);
        let interface = interface(platform, &mut device);
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
        }
    }

    /// Takes the address, routes and MTU of a lease.
    pub fn configure(&mut self, lease: &Lease) {
        if let Some(mtu) = lease.mtu {
            self.device.limit_mtu(mtu);
        }
        self.interface = interface(self.platform, &mut self.device);
        self.interface.update_ip_addrs(|addresses| {
            // An empty list has room for one.
            let _ = addresses.push(IpCidr::new(lease.address.into(), lease.prefix));
        });
        if let Some(router) = lease.router {
            let routes = self.interface.routes_mut();
            let _ = routes.add_default_ipv4_route(router);
        }
    }

    /// Asks for the MACs of the router and the resolvers, on behalf of all CPUs: answers go to each
    /// of them. smoltcp by itself asks when a packet waits, and for one neighbour a second only.
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
            // With a full queue, smoltcp asks when it comes to that.
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
    }

    /// Bytes of an IP packet, at most.
    pub fn mtu(&mut self) -> usize {
        self.device.capabilities().ip_mtu()
    }

    /// Nanoseconds, on the platform's clock.
    pub fn now_ns(&self) -> u64 {
        self.platform.now_ns()
    }

    /// Adds a TCP socket as all workloads want it: no delayed acknowledgements, no Nagle.
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

    /// A TCP socket.
    pub fn tcp(&mut self, handle: SocketHandle) -> &mut tcp::Socket<'static> {
        self.sockets.get_mut(handle)
    }

    /// Drives the stack and gives `step` its turn between the frames that came and those that go,
    /// until it is done; what it sent last is on its way then.
    pub fn drive<T>(&mut self, step: impl FnMut(&mut Self) -> Turn<T>) -> T {
        self.drive_until(step, || false)
    }

    /// [`Stack::drive`] of a step that also waits for what another CPU writes, which then calls
    /// [`Lanes::nudge`]: `ready` says that it was written.
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
                // Also what was sent may have changed a socket: a RST ends it.
                Turn::Waiting(_) if received || (sent && !full) => continue,
                Turn::Worked => None,
                Turn::Waiting(until_ns) => until_ns,
            };
            let now_ns = self.now_ns();
            let timer = self.interface.poll_at(instant(now_ns), &self.sockets);
            let timer_ns = timer.map(|at| (at.total_micros().max(0) as u64) * 1000);
            let until_ns = match [until_ns, timer_ns].into_iter().flatten().min() {
                // Whatever is due can't be sent.
                _ if full => Some(now_ns + FULL_RETRY_NS),
                Some(until_ns) if until_ns <= now_ns => continue,
                until_ns => until_ns,
            };
            if !self.device.nic.arm() {
                continue;
            }
            if full {
                // What other CPUs have passed on has to wait too, for room for an answer.
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

    /// Whether there was anything to send.
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

    /// The time, which the timestamps of TCP see too.
    fn tick(&self) -> Instant {
        let now_ns = self.now_ns();
        let now_ms = (now_ns / 1_000_000) as u32;
        if now_ms > TIMESTAMP_MS.load(Ordering::Relaxed) {
            // Not a store: a CPU that was held up here must not turn the clock back for the others,
            // whose segments their peers would then refuse (PAWS).
            TIMESTAMP_MS.fetch_max(now_ms, Ordering::Relaxed);
        }
        instant(now_ns)
    }
}

/// Milliseconds, for TCP timestamps: smoltcp asks a plain function for them.
static TIMESTAMP_MS: AtomicU32 = AtomicU32::new(0);

/// What they begin with: the lower bits of the time of day.
static BOOTED_UNIX_MS: AtomicU32 = AtomicU32::new(0);

/// The clock of TCP timestamps (RFC 7323). With them, a server that holds a tuple in TIME-WAIT takes
/// a new connection from the same port, whatever its initial sequence number. Also one of another
/// boot: were the clock to begin anew with each, a guest that comes soon after another one would
/// seem to be of the past (PAWS), and its SYN would have to be sent again after a second.
pub fn timestamp_ms() -> u32 {
    let booted = BOOTED_UNIX_MS.load(Ordering::Relaxed);
    booted.wrapping_add(TIMESTAMP_MS.load(Ordering::Relaxed))
}

fn instant(now_ns: u64) -> Instant {
    Instant::from_micros((now_ns / 1000) as i64)
}

fn interface<P: Platform, N: Nic>(platform: &P, device: &mut Steered<'_, P, N>) -> Interface {
    let mut config = Config::new(EthernetAddress(device.nic.mac()).into());
    let mut seed = [0; 8];
    platform.random(&mut seed);
    config.random_seed = u64::from_le_bytes(seed);
    Interface::new(config, device, instant(platform.now_ns()))
}

#[cfg(test)]
#[path = "stack_test.rs"]
mod tests;
