//! A queue pair as a device for smoltcp: it delivers only the frames that belong to this CPU.

use alloc::vec::Vec;
use core::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    sync::atomic::{AtomicBool, Ordering},
};

use smoltcp::{
    phy::{Device, DeviceCapabilities, PacketMeta, RxToken},
    time::Instant,
};

use super::{
    inbox::{Inbox, InboxCounters},
    ipv6::{Ipv6Lease, advertised},
    ports,
    run_clock::Stops,
};
use crate::platform::{Nic, Platform};

/// Connections between the CPUs: an inbox and a sleep flag for each.
pub struct Lanes {
    lanes: Vec<Lane>,
    pub(super) stops: Stops,
}

#[derive(Default)]
struct Lane {
    inbox: Inbox,
    asleep: AtomicBool,
}

impl Lanes {
    /// Returns the connections for `cpus` CPUs.
    pub fn new(cpus: usize) -> Self {
        Lanes {
            lanes: (0..cpus).map(|_| Lane::default()).collect(),
            stops: Stops::default(),
        }
    }

    /// Returns the number of CPUs.
    pub fn cpus(&self) -> usize {
        self.lanes.len()
    }

    /// Returns the counters of a CPU's inbox.
    pub fn counters(&self, cpu: usize) -> InboxCounters {
        self.lanes[cpu].inbox.counters()
    }

    /// Wakes a CPU if it sleeps. Must be called after the data that the CPU is to see was written.
    pub fn nudge(&self, cpu: usize, platform: &impl Platform) {
        if self.lanes[cpu].asleep.swap(false, Ordering::SeqCst) {
            platform.wake(cpu);
        }
    }

    /// Idles unless there is a frame in the inbox or `ready` returns true. A CPU that writes the
    /// data which `ready` reads and then calls [`Lanes::nudge`] ends it.
    pub fn sleep(
        &self,
        cpu: usize,
        platform: &impl Platform,
        until_ns: Option<u64>,
        ready: impl FnOnce() -> bool,
    ) {
        let lane = &self.lanes[cpu];
        lane.asleep.store(true, Ordering::SeqCst);
        if lane.inbox.is_empty() && !ready() {
            platform.idle(until_ns);
        }
        lane.asleep.store(false, Ordering::SeqCst);
    }

    pub(super) fn pass(&self, cpu: usize, frame: &[u8], platform: &impl Platform) {
        self.lanes[cpu].inbox.put(frame);
        self.nudge(cpu, platform);
    }
}

/// ICMP error about a packet that this CPU sent (RFC 792, RFC 4443).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IcmpError {
    /// ICMP type: 3 is Destination Unreachable, and 1 by IPv6.
    pub kind: u8,
    /// ICMP code of the error.
    pub code: u8,
    /// IP protocol of the packet.
    pub protocol: u8,
    /// Local port of the packet.
    pub port: u16,
    /// Destination of the packet.
    pub remote: SocketAddr,
}

impl IcmpError {
    /// Returns whether it says that the destination can't be reached.
    pub fn is_unreachable(&self) -> bool {
        self.kind == if self.remote.is_ipv4() { 3 } else { 1 }
    }
}

/// Largest number of ICMP errors that are kept until they are taken.
const ERRORS_KEPT: usize = 256;

/// Device of one CPU for smoltcp.
pub struct Steered<'s, P, N> {
    /// Queue pair of the CPU.
    pub nic: N,
    cpu: usize,
    platform: &'s P,
    lanes: &'s Lanes,
    /// Largest frame, bytes with the Ethernet header, if less than the device's.
    mtu_limit: usize,
    /// Frame last taken from the inbox, and whether it is still to be delivered.
    passed: Vec<u8>,
    held: bool,
    errors: Vec<IcmpError>,
    ipv6: Option<Ipv6Lease>,
    /// True after the transmit queue was full.
    full: bool,
}

impl<'s, P: Platform, N: Nic> Steered<'s, P, N> {
    /// Returns the device of CPU `cpu` over its queue pair.
    pub fn new(nic: N, cpu: usize, platform: &'s P, lanes: &'s Lanes) -> Self {
        Steered {
            nic,
            cpu,
            platform,
            lanes,
            mtu_limit: usize::MAX,
            passed: Vec::new(),
            held: false,
            errors: Vec::with_capacity(ERRORS_KEPT),
            ipv6: None,
            full: false,
        }
    }

    /// Limits IP packets to `mtu` bytes. The interface must be created again after it.
    pub fn limit_mtu(&mut self, mtu: u16) {
        self.mtu_limit = usize::from(mtu) + 14;
    }

    /// Takes the ICMP errors since the last call.
    pub fn take_errors(&mut self) -> impl Iterator<Item = IcmpError> + '_ {
        self.errors.drain(..)
    }

    /// Returns what the first router that advertised a prefix to this CPU gives the guest.
    pub fn ipv6(&self) -> Option<&Ipv6Lease> {
        self.ipv6.as_ref()
    }

    /// Returns whether the transmit queue was full for a frame since the last call.
    pub fn take_full(&mut self) -> bool {
        core::mem::take(&mut self.full)
    }
}

impl<'s, P: Platform, N: Nic> Device for Steered<'s, P, N> {
    type RxToken<'a>
        = SteeredRx<'a, P, N::RxToken<'a>>
    where
        Self: 'a;
    type TxToken<'a>
        = N::TxToken<'a>
    where
        Self: 'a;

    fn receive(&mut self, now: Instant) -> Option<(Self::RxToken<'_>, Self::TxToken<'_>)> {
        let route = Route {
            cpu: self.cpu,
            platform: self.platform,
            lanes: self.lanes,
            errors: &mut self.errors,
            mac: self.nic.mac(),
            ipv6: &mut self.ipv6,
        };
        if self.held || self.lanes.lanes[self.cpu].inbox.take(&mut self.passed) {
            let tx = self.nic.transmit(now);
            self.held = tx.is_none();
            self.full |= tx.is_none();
            let frame = &self.passed;
            return tx.map(|tx| (SteeredRx::Passed { frame, route }, tx));
        }
        let (rx, tx) = self.nic.receive(now)?;
        Some((SteeredRx::Received { rx, route }, tx))
    }

    fn transmit(&mut self, now: Instant) -> Option<Self::TxToken<'_>> {
        let tx = self.nic.transmit(now);
        self.full |= tx.is_none();
        tx
    }

    fn capabilities(&self) -> DeviceCapabilities {
        let mut capabilities = self.nic.capabilities();
        capabilities.max_transmission_unit = capabilities.max_transmission_unit.min(self.mtu_limit);
        capabilities
    }
}

/// Received frame. Its CPU is determined when smoltcp reads it.
pub enum SteeredRx<'a, P, R> {
    /// The frame came in on this CPU's queue.
    Received {
        /// Token of the queue.
        rx: R,
        /// Context for steering the frame.
        route: Route<'a, P>,
    },
    /// Another CPU passed the frame on.
    Passed {
        /// Bytes of the frame.
        frame: &'a [u8],
        /// Context for recording ICMP errors and advertisements.
        route: Route<'a, P>,
    },
}

impl<P: Platform, R: RxToken> RxToken for SteeredRx<'_, P, R> {
    /// Passes a frame of another CPU on, and shows an empty frame to smoltcp, which ignores it.
    fn consume<T, F: FnOnce(&[u8]) -> T>(self, f: F) -> T {
        match self {
            SteeredRx::Received { rx, mut route } => rx.consume(|frame| {
                let here = route.deliver(frame);
                f(if here { frame } else { &[] })
            }),
            SteeredRx::Passed { frame, mut route } => {
                route.note(frame);
                f(frame)
            }
        }
    }

    fn meta(&self) -> PacketMeta {
        match self {
            SteeredRx::Received { rx, .. } => rx.meta(),
            SteeredRx::Passed { .. } => PacketMeta::default(),
        }
    }
}

/// Context for steering a frame.
pub struct Route<'a, P> {
    cpu: usize,
    platform: &'a P,
    lanes: &'a Lanes,
    errors: &'a mut Vec<IcmpError>,
    mac: [u8; 6],
    ipv6: &'a mut Option<Ipv6Lease>,
}

impl<P: Platform> Route<'_, P> {
    /// Passes a frame on to its CPUs. Returns true if it is (also) for this CPU.
    fn deliver(&mut self, frame: &[u8]) -> bool {
        let cpus = self.lanes.cpus();
        match whose(frame, cpus) {
            Whose::Anyones => true,
            Whose::Everyones => {
                for cpu in (0..cpus).filter(|cpu| *cpu != self.cpu) {
                    self.lanes.pass(cpu, frame, self.platform);
                }
                true
            }
            Whose::Of(cpu) if cpu != self.cpu => {
                self.lanes.pass(cpu, frame, self.platform);
                false
            }
            Whose::Of(_) => {
                self.note(frame);
                true
            }
        }
    }

    /// Records the frame if it is an ICMP error, or the first advertisement of a prefix.
    fn note(&mut self, frame: &[u8]) {
        if self.ipv6.is_none() {
            *self.ipv6 = advertised(frame, self.mac);
        }
        if self.errors.len() < ERRORS_KEPT
            && let Some(error) = icmp_error(frame)
        {
            self.errors.push(error);
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Whose {
    /// The CPU that received it may keep it.
    Anyones,
    /// All CPUs must see it.
    Everyones,
    /// It belongs to this CPU alone.
    Of(usize),
}

const ETHERNET: usize = 14;
const IPV4: [u8; 2] = [0x08, 0x00];
const IPV6: [u8; 2] = [0x86, 0xDD];
const PROTOCOL_ICMP: u8 = 1;
const PROTOCOL_TCP: u8 = 6;
const PROTOCOL_UDP: u8 = 17;
const PROTOCOL_ICMPV6: u8 = 58;

/// Returns the CPU of a frame, by ARP operation, destination port, or the source port of the packet
/// that an ICMP error is about. Any CPU may keep a frame without these, or one that is truncated.
/// Fragments go to CPU 0: only the first has a port.
///
/// By IPv6, a neighbour's advertisement is what the answer to an ARP request is. CPU 0 has all other
/// messages, and what has extension headers: it is the first that has an address.
fn whose(frame: &[u8], cpus: usize) -> Whose {
    let owner = match frame.get(12..14) {
        Some([0x08, 0x06]) if frame.get(20..22) == Some(&[0, 2]) => Some(Whose::Everyones),
        Some(kind) if kind == IPV4 => ip_owner(&frame[ETHERNET..], cpus).map(Whose::Of),
        Some(kind) if kind == IPV6 => ipv6_owner(&frame[ETHERNET..], cpus),
        _ => None,
    };
    owner.unwrap_or(Whose::Anyones)
}

fn ip_owner(packet: &[u8], cpus: usize) -> Option<usize> {
    let (protocol, payload) = ipv4(packet)?;
    match protocol {
        _ if u16::from_be_bytes([packet[6], packet[7]]) & 0x3fff != 0 => Some(0),
        PROTOCOL_TCP | PROTOCOL_UDP => Some(ports::owner(port(payload, 2)?, cpus)),
        PROTOCOL_ICMP => match payload.first()? {
            // Echo reply: only CPU 0 sends requests.
            0 => Some(0),
            3 | 11 | 12 => Some(ports::owner(port(ipv4(payload.get(8..)?)?.1, 0)?, cpus)),
            _ => None,
        },
        _ => None,
    }
}

fn ipv6_owner(packet: &[u8], cpus: usize) -> Option<Whose> {
    const NEIGHBOR_ADVERTISEMENT: u8 = 136;
    let (next_header, payload) = ipv6(packet)?;
    let port = match next_header {
        PROTOCOL_TCP | PROTOCOL_UDP => port(payload, 2)?,
        PROTOCOL_ICMPV6 => match *payload.first()? {
            1..=4 => port(ipv6(payload.get(8..)?)?.1, 0)?,
            NEIGHBOR_ADVERTISEMENT => return Some(Whose::Everyones),
            _ => return Some(Whose::Of(0)),
        },
        _ => return Some(Whose::Of(0)),
    };
    Some(Whose::Of(ports::owner(port, cpus)))
}

fn icmp_error(frame: &[u8]) -> Option<IcmpError> {
    let is_ipv4 = match <[u8; 2]>::try_from(frame.get(12..14)?).ok()? {
        IPV4 => true,
        IPV6 => false,
        _ => return None,
    };
    let split = if is_ipv4 { ipv4 } else { ipv6 };
    let (protocol, icmp) = split(&frame[ETHERNET..])?;
    let (kind, code) = (*icmp.first()?, *icmp.get(1)?);
    let is_error = match is_ipv4 {
        true => protocol == PROTOCOL_ICMP && matches!(kind, 3 | 11 | 12),
        false => protocol == PROTOCOL_ICMPV6 && matches!(kind, 1..=4),
    };
    if !is_error {
        return None;
    }
    let about = icmp.get(8..)?;
    let (protocol, payload) = split(about)?;
    let remote = match is_ipv4 {
        true => IpAddr::from(Ipv4Addr::new(about[16], about[17], about[18], about[19])),
        false => IpAddr::from(Ipv6Addr::from(
            <[u8; 16]>::try_from(about.get(24..40)?).ok()?,
        )),
    };
    Some(IcmpError {
        kind,
        code,
        protocol,
        port: port(payload, 0)?,
        remote: SocketAddr::new(remote, port(payload, 2)?),
    })
}

/// Returns the protocol and payload of an IPv4 packet, which may be truncated behind its header.
fn ipv4(packet: &[u8]) -> Option<(u8, &[u8])> {
    let header_len = usize::from(packet.first()? & 0x0f) * 4;
    if packet[0] >> 4 != 4 || header_len < 20 {
        return None;
    }
    Some((*packet.get(9)?, packet.get(header_len..)?))
}

/// Returns the first next header and what follows the header of an IPv6 packet, which may be
/// truncated there.
fn ipv6(packet: &[u8]) -> Option<(u8, &[u8])> {
    if packet.first()? >> 4 != 6 {
        return None;
    }
    Some((*packet.get(6)?, packet.get(40..)?))
}

fn port(transport: &[u8], at: usize) -> Option<u16> {
    let bytes = transport.get(at..at + 2)?;
    Some(u16::from_be_bytes([bytes[0], bytes[1]]))
}

#[cfg(test)]
#[path = "steering_test.rs"]
mod tests;
