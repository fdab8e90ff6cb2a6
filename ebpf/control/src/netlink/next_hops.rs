//! Keeps `NEXT_HOPS` fresh: the L2 headers that the programs write themselves.
//!
//! An engine claims an element by interface and neighbour, not valid yet
//! ([`SharedMaps::claim_next_hop`]). The broker completes it as soon as the neighbour's MAC is
//! known, asks the kernel to keep knowing it (a managed neighbour entry, Linux 5.16), and withdraws
//! it whenever the kernel itself would not use what stands there. Until then the programs let the
//! kernel resolve the neighbour, packet by packet.
//!
//! What stands there is the engine's word, whoever may have taken it over. So the kernel is asked
//! for nothing but what the broker knows by itself to be right: neighbours on the uplink that it
//! chose, which the host's own routes lead to, and so many at a time ([`MOST`]).
//!
//! The engine may give an element back, and claim it for somebody else, at any moment. Both withdraw
//! it, which the sequence number shows ([`NextHop`]): what was written for the one before is then
//! never put into use.

use std::{collections::HashSet, net::Ipv4Addr, sync::atomic::Ordering::Acquire};

use netlink_packet_core::{NLM_F_CREATE, NLM_F_REPLACE};
use netlink_packet_route::{
    AddressFamily, RouteNetlinkMessage,
    neighbour::{
        NeighbourAddress, NeighbourAttribute, NeighbourExtFlags, NeighbourFlags, NeighbourMessage,
    },
};
use slipgate_abi::{
    NextHop, NextHopRef,
    link::{NextHopFlags, is_usable},
};

use super::{network::Network, socket::Requests};
use crate::{Result, maps::SharedMaps};

/// Of one owner, those that are kept fresh: more than an engine claims.
const MOST: usize = 256;

/// The next hops of one owner.
#[derive(Debug)]
pub struct NextHops {
    owner_row: u32,
    requests: Requests,
    /// What the kernel was asked to keep knowing.
    managed: HashSet<(u32, Ipv4Addr)>,
}

/// What an element is to say.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Wanted {
    mtu: u32,
    flags: u32,
    neighbour_mac: [u8; 6],
    uplink_mac: [u8; 6],
}

impl NextHops {
    /// For the row's owner, in the calling thread's network namespace.
    pub fn new(owner_row: u32) -> Result<Self> {
        Ok(Self {
            owner_row,
            requests: Requests::open()?,
            managed: HashSet::new(),
        })
    }

    /// Brings every element of the owner up to date; how many are valid. Call it after each change
    /// of the network, and when an engine has claimed one. `uplink`: the one device that flows leave
    /// by.
    pub fn refresh(&mut self, maps: &SharedMaps, network: &Network, uplink: u32) -> Result<usize> {
        let mut valid = 0;
        let mut wanted_still = HashSet::new();
        for index in maps.next_hops_of(self.owner_row) {
            let Some(hop) = maps.next_hop(index) else {
                continue;
            };
            // Before who it was claimed for: a claim that comes between is another number.
            let seen = hop.sequence().load(Acquire);
            let Some(claim) = claimed_for(maps, index, hop) else {
                continue;
            };
            let (ifindex, neighbour) = (claim.ifindex, claim.neighbour);
            let is_known = wanted_still.contains(&(ifindex, neighbour));
            let is_wanted = is_known
                || ifindex == uplink
                    && wanted_still.len() < MOST
                    && network.is_next_hop(uplink, neighbour);
            if is_wanted {
                wanted_still.insert((ifindex, neighbour));
                self.keep_known(network, ifindex, neighbour);
            }
            match wanted(network, claim).filter(|_| is_wanted) {
                Some(wanted) => valid += usize::from(write(hop, seen, wanted)),
                None if is_usable(seen) => drop(hop.withdraw_from(seen)),
                None => {}
            }
        }
        self.let_go(|hop| !wanted_still.contains(hop));
        Ok(valid)
    }

    /// Asks the kernel no more to keep the neighbours known.
    pub fn release(mut self) -> Result<()> {
        self.let_go(|_| true);
        Ok(())
    }

    fn let_go(&mut self, mut which: impl FnMut(&(u32, Ipv4Addr)) -> bool) {
        let gone: Vec<_> = self.managed.extract_if(|hop| which(hop)).collect();
        for (ifindex, neighbour) in gone {
            // A link or entry that is gone is fine.
            let _ = self.ask(ifindex, neighbour, NeighbourExtFlags::empty());
        }
    }

    /// Has the kernel resolve the neighbour, and keep it resolved. Where it refuses (its table is
    /// full, the link went just now) the programs ask it packet by packet, nothing worse.
    fn keep_known(&mut self, network: &Network, ifindex: u32, neighbour: Ipv4Addr) {
        let Some(link) = network.links.get(&ifindex).filter(|link| link.up) else {
            // When it is back, its entries are not.
            self.managed.retain(|(managed, _)| *managed != ifindex);
            return;
        };
        let known = network.neighbours.get(&(ifindex, neighbour));
        let by_hand = known.is_some_and(|neighbour| neighbour.permanent);
        let resolves = link.has_l2 && link.arp && !link.loopback && !neighbour.is_unspecified();
        if !resolves || by_hand {
            return;
        }
        if known.is_none() {
            self.managed.remove(&(ifindex, neighbour));
        }
        if self.managed.contains(&(ifindex, neighbour)) {
            return;
        }
        let asked = match self.ask(ifindex, neighbour, NeighbourExtFlags::Managed) {
            Ok(()) => {
                self.managed.insert((ifindex, neighbour));
                return;
            }
            // A kernel without managed entries resolves it once, and again at the next refresh.
            Err(error) if error.errno() == Some(libc::EINVAL) => {
                self.ask(ifindex, neighbour, NeighbourExtFlags::empty())
            }
            other => other,
        };
        if let Err(error) = asked {
            tracing::debug!("{error}");
        }
    }

    fn ask(&mut self, ifindex: u32, neighbour: Ipv4Addr, extra: NeighbourExtFlags) -> Result<()> {
        let mut message = NeighbourMessage::default();
        message.header.family = AddressFamily::Inet;
        message.header.ifindex = ifindex;
        // The kernel keeps the state of an entry that is there, and begins to resolve.
        message.header.flags = NeighbourFlags::Use;
        message.attributes = vec![NeighbourAttribute::Destination(NeighbourAddress::Inet(
            neighbour,
        ))];
        if !extra.is_empty() {
            message.attributes.push(NeighbourAttribute::ExtFlags(extra));
        }
        self.requests.send(
            RouteNetlinkMessage::NewNeighbour(message),
            NLM_F_CREATE | NLM_F_REPLACE,
            &format!("have {neighbour} on ifindex {ifindex} resolved"),
        )
    }
}

/// What an element was claimed for.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Claim {
    ifindex: u32,
    neighbour: Ipv4Addr,
    /// 0: the routes say nothing.
    route_mtu: u32,
}

/// What an element was claimed for; `None` when it is not, or not quite yet.
fn claimed_for(maps: &SharedMaps, index: u32, hop: NextHopRef) -> Option<Claim> {
    let ifindex = maps.hop_ifindex(index).load(Acquire);
    // SAFETY: an element of NEXT_HOPS, whose words do not tear. They are written before `ifindex`;
    // where it is claimed anew in between, the sequence number is another.
    let (neighbour, route_mtu) = unsafe {
        (
            (&raw const (*hop.as_ptr()).neighbour).read_volatile(),
            (&raw const (*hop.as_ptr()).route_mtu).read_volatile(),
        )
    };
    (ifindex != 0).then(|| Claim {
        ifindex,
        neighbour: neighbour.into(),
        route_mtu,
    })
}

/// What the programs may use for this claim; `None` when nothing.
fn wanted(network: &Network, claim: Claim) -> Option<Wanted> {
    let Claim {
        ifindex, neighbour, ..
    } = claim;
    let link = network.links.get(&ifindex).filter(|link| link.up)?;
    let mtu = match claim.route_mtu {
        0 => link.mtu,
        route => link.mtu.min(route),
    };
    if !link.has_l2 {
        return Some(Wanted {
            mtu,
            flags: NextHopFlags::NO_L2,
            neighbour_mac: [0; 6],
            uplink_mac: [0; 6],
        });
    }
    Some(Wanted {
        mtu,
        flags: 0,
        neighbour_mac: network.neighbours.get(&(ifindex, neighbour))?.mac?,
        uplink_mac: link.mac?,
    })
}

/// Writes an element that was at the sequence number `seen`, unless it says so already; whether it
/// is in use then. It is not when the engine has given it back meanwhile, and perhaps claimed it
/// anew: a claim asks for another refresh.
fn write(hop: NextHopRef, seen: u32, wanted: Wanted) -> bool {
    let element: *mut NextHop = hop.as_ptr();
    // SAFETY: an element that only this process writes, field by field; who reads them finds out by
    // the sequence number whether they go together.
    unsafe {
        let written = Wanted {
            mtu: (&raw const (*element).mtu).read_volatile(),
            flags: (&raw const (*element).flags).read_volatile(),
            neighbour_mac: (&raw const (*element).neighbour_mac).read_volatile(),
            uplink_mac: (&raw const (*element).uplink_mac).read_volatile(),
        };
        if is_usable(seen) && written == wanted {
            return true;
        }
        let Some(withdrawn) = hop.withdraw_from(seen) else {
            return false;
        };
        (&raw mut (*element).mtu).write_volatile(wanted.mtu);
        (&raw mut (*element).flags).write_volatile(wanted.flags);
        (&raw mut (*element).neighbour_mac).write_volatile(wanted.neighbour_mac);
        (&raw mut (*element).uplink_mac).write_volatile(wanted.uplink_mac);
        hop.publish(withdrawn)
    }
}

#[cfg(test)]
#[path = "next_hops_test.rs"]
mod tests;
