//! Maintains `NEXT_HOPS`: the L2 headers that the programs write themselves.
//!
//! An engine claims an element by interface and neighbour, not valid yet
//! ([`SharedMaps::claim_next_hop`]). The broker completes it as soon as the neighbour's MAC is
//! known, asks the kernel to keep the neighbour resolved (a managed neighbour entry, Linux 5.16),
//! and withdraws the element when link or neighbour are gone. While it is not valid, the programs let
//! the kernel resolve the neighbour, packet by packet.
//!
//! The engine writes the claim, and an attacker may have taken the engine over. So the broker asks
//! the kernel only for what it knows by itself to be right: neighbours on the uplinks that it chose,
//! which the host's own routes use, and a limited number of them ([`MOST`]). A neighbour that a route
//! has used stays right while it is claimed: live flows go on where a route is merely missing, and
//! without the element the kernel would find no way for their packets. Flows that a route leads elsewhere
//! are the engine's to move. A successor has it from a record which next hops were right
//! ([`Owner::note_next_hops`](crate::owner::Owner::note_next_hops)).
//!
//! The engine may free an element, and claim it for another neighbour, at any moment. Both withdraw
//! it, which the sequence number shows ([`NextHop`]): data written for the previous claim is then
//! never put into use.

use std::{
    collections::{BTreeSet, HashSet},
    net::IpAddr,
    sync::atomic::Ordering::Acquire,
};

use netlink_packet_core::{NLM_F_CREATE, NLM_F_REPLACE};
use netlink_packet_route::{
    AddressFamily, RouteNetlinkMessage,
    neighbour::{
        NeighbourAddress, NeighbourAttribute, NeighbourExtFlags, NeighbourFlags, NeighbourMessage,
    },
};
use slipgate_abi::{
    IfIndex, NextHop, NextHopRef,
    link::{NextHopFlags, is_usable},
};

use super::{network::Network, socket::Requests};
use crate::{
    Result,
    maps::{SharedMaps, neighbour_of},
};

/// Maximum number of neighbours that are maintained: more than an engine claims.
const MOST: usize = 256;

/// The next hops of one process, of all its rows: its engines may claim the same neighbour.
#[derive(Debug)]
pub struct NextHops {
    owner_rows: Vec<u32>,
    requests: Requests,
    /// Neighbours that the kernel was asked to keep resolved, by ifindex and address.
    managed: HashSet<(IfIndex, IpAddr)>,
    /// Neighbours that were found right and claimed at the last refresh.
    right: HashSet<(IfIndex, IpAddr)>,
}

/// Contents that an element is to have.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Wanted {
    mtu: u32,
    flags: u32,
    neighbour_mac: [u8; 6],
    uplink_mac: [u8; 6],
}

impl NextHops {
    /// Creates the state of the rows' process, in the calling thread's network namespace.
    ///
    /// # Errors
    /// No netlink socket can be opened.
    pub fn new(owner_rows: Vec<u32>) -> Result<Self> {
        Ok(Self {
            owner_rows,
            requests: Requests::open()?,
            managed: HashSet::new(),
            right: HashSet::new(),
        })
    }

    /// Takes over what predecessors in these rows found right. Of these the first refresh keeps what
    /// is claimed.
    pub fn after(mut self, right: HashSet<(IfIndex, IpAddr)>) -> Self {
        self.right = right;
        self
    }

    /// Returns the claimed neighbours that were found right at the last refresh, by ifindex and
    /// address.
    pub fn right(&self) -> &HashSet<(IfIndex, IpAddr)> {
        &self.right
    }

    /// Updates every element of the rows, and returns how many are valid. To be called after each
    /// change of the network, and when an engine has claimed one. `uplinks`: the devices by which
    /// flows leave.
    ///
    /// # Errors
    /// None at present: the programs work without an element that cannot be completed.
    pub fn refresh(
        &mut self,
        maps: &SharedMaps,
        network: &Network,
        uplinks: &BTreeSet<IfIndex>,
    ) -> Result<usize> {
        let mut valid = 0;
        let mut wanted_still = HashSet::new();
        let hops = self.owner_rows.iter().map(|row| maps.next_hops_of(*row));
        let hops: Vec<u32> = hops.flatten().collect();
        for index in hops {
            let Some(hop) = maps.next_hop(index) else {
                continue;
            };
            // Read before the claim: a later claim changes the sequence number.
            let seen = hop.sequence().load(Acquire);
            let Some(claim) = claim_of(maps, index, hop) else {
                continue;
            };
            let (ifindex, neighbour) = (claim.ifindex, claim.neighbour);
            // Without any route by it a device is no uplink of a policy either.
            let is_right = || {
                self.right.contains(&(ifindex, neighbour))
                    || uplinks.contains(&ifindex) && network.is_next_hop(ifindex, neighbour)
            };
            let is_wanted = wanted_still.contains(&(ifindex, neighbour))
                || wanted_still.len() < MOST && is_right();
            if is_wanted {
                wanted_still.insert((ifindex, neighbour));
                self.keep_resolved(network, ifindex, neighbour);
            }
            match wanted(network, claim).filter(|_| is_wanted) {
                Some(wanted) => valid += usize::from(write(hop, seen, wanted)),
                None if is_usable(seen) => drop(hop.withdraw_from(seen)),
                None => {}
            }
        }
        self.unmanage(|hop| !wanted_still.contains(hop));
        self.right = wanted_still;
        Ok(valid)
    }

    /// Releases all neighbours: the kernel need not keep them resolved any more.
    ///
    /// # Errors
    /// None at present: a neighbour that cannot be released is ignored.
    pub fn release(mut self) -> Result<()> {
        self.unmanage(|_| true);
        Ok(())
    }

    fn unmanage(&mut self, mut which: impl FnMut(&(IfIndex, IpAddr)) -> bool) {
        let gone: Vec<_> = self.managed.extract_if(|hop| which(hop)).collect();
        for (ifindex, neighbour) in gone {
            // The link or the entry may be gone.
            let _ = self.request(ifindex, neighbour, NeighbourExtFlags::empty());
        }
    }

    /// Asks the kernel to resolve the neighbour, and to keep it resolved. If it refuses (its table
    /// is full, the link was removed just now), the programs ask it packet by packet.
    fn keep_resolved(&mut self, network: &Network, ifindex: IfIndex, neighbour: IpAddr) {
        let Some(link) = network.links.get(&ifindex).filter(|link| link.up) else {
            // The kernel removes the entries of a link that goes down.
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
        let answer = match self.request(ifindex, neighbour, NeighbourExtFlags::Managed) {
            Ok(()) => {
                self.managed.insert((ifindex, neighbour));
                return;
            }
            // A kernel without managed entries resolves it once, and again at the next refresh.
            Err(error) if error.errno() == Some(libc::EINVAL) => {
                self.request(ifindex, neighbour, NeighbourExtFlags::empty())
            }
            other => other,
        };
        if let Err(error) = answer {
            tracing::debug!("{error}");
        }
    }

    fn request(
        &mut self,
        ifindex: IfIndex,
        neighbour: IpAddr,
        extra: NeighbourExtFlags,
    ) -> Result<()> {
        let mut message = NeighbourMessage::default();
        let (family, destination) = match neighbour {
            IpAddr::V4(address) => (AddressFamily::Inet, NeighbourAddress::Inet(address)),
            IpAddr::V6(address) => (AddressFamily::Inet6, NeighbourAddress::Inet6(address)),
        };
        message.header.family = family;
        message.header.ifindex = ifindex.get();
        // The kernel keeps the state of an entry that is there, and begins to resolve.
        message.header.flags = NeighbourFlags::Use;
        message.attributes = vec![NeighbourAttribute::Destination(destination)];
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

/// Claim of an element.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Claim {
    ifindex: IfIndex,
    neighbour: IpAddr,
    /// MTU of the route, L3 bytes; 0: the route has none.
    route_mtu: u32,
}

/// Returns the claim of an element; `None` if it has none, or not completely yet.
fn claim_of(maps: &SharedMaps, index: u32, hop: NextHopRef) -> Option<Claim> {
    let ifindex = IfIndex::new(maps.hop_ifindex(index).load(Acquire));
    // SAFETY: an element of NEXT_HOPS, whose words do not tear. They are written before `ifindex`;
    // if it is claimed again in between, the sequence number differs.
    let (neighbour, route_mtu) = unsafe {
        (
            neighbour_of(hop.as_ptr()),
            (&raw const (*hop.as_ptr()).route_mtu).read_volatile(),
        )
    };
    ifindex.is_some().then_some(Claim {
        ifindex,
        neighbour,
        route_mtu,
    })
}

/// Returns the contents that the programs may use for a claim; `None` if the link is down or the
/// neighbour is not resolved.
fn wanted(network: &Network, claim: Claim) -> Option<Wanted> {
    let Claim {
        ifindex, neighbour, ..
    } = claim;
    let link = network.links.get(&ifindex).filter(|link| link.up)?;
    let family = match neighbour {
        IpAddr::V4(_) => 0,
        IpAddr::V6(_) => NextHopFlags::IPV6,
    };
    let mtu = match claim.route_mtu {
        0 => link.mtu,
        route => link.mtu.min(route),
    };
    if !link.has_l2 {
        return Some(Wanted {
            mtu,
            flags: family | NextHopFlags::NO_L2,
            neighbour_mac: [0; 6],
            uplink_mac: [0; 6],
        });
    }
    Some(Wanted {
        mtu,
        flags: family,
        neighbour_mac: network.neighbours.get(&(ifindex, neighbour))?.mac?,
        uplink_mac: link.mac?,
    })
}

/// Writes an element that was at the sequence number `seen`, unless it has these contents already.
/// Returns whether it is valid. It is not if the engine has freed it meanwhile, and perhaps claimed
/// it again: a claim asks for another refresh.
fn write(hop: NextHopRef, seen: u32, wanted: Wanted) -> bool {
    let element: *mut NextHop = hop.as_ptr();
    // SAFETY: an element that only this process writes, field by field; readers detect by the
    // sequence number whether the fields belong together.
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
