//! Choice of one of a route's next hops (ECMP).
//!
//! # Theory of operation
//! A route may have several next hops, each with a weight. Flows are spread over them by a hash of
//! their tuple on the guest's link, in proportion to the weights: all packets of a flow take one next
//! hop, and flows of one guest to one server take several. The hash has no secret and is the same in
//! every process and version, so a flow that is looked up again gets the same next hop as long as the
//! route is the same. A guest that chooses its ports to overload a next hop gains nothing: it may send
//! as much by one flow.
//!
//! When a next hop dies or comes, the shares move, and flows would change over that need not. So
//! whoever looks up a live flow asks for its present next hop first ([`keeping`]).
use std::net::IpAddr;

use slipgate_abi::IfIndex;

use super::RouteEntry;
use crate::FlowTuple;

/// Chooses one of a route's next hops by its position. It is asked only if there are several; a
/// position out of bounds means the first.
pub type Choose<'a> = dyn FnMut(&[&RouteEntry]) -> usize + 'a;

/// Chooses the first next hop: for what is no flow.
pub fn first(_: &[&RouteEntry]) -> usize {
    0
}

/// Chooses the next hop of a flow, by its tuple on the guest's link.
pub fn by_flow(flow: &FlowTuple) -> impl FnMut(&[&RouteEntry]) -> usize {
    move |hops| position(hash(flow), hops)
}

/// Chooses a flow's present next hop, an uplink and a neighbour on it, while the route has it, and
/// otherwise as [`by_flow`] does. A neighbour that is unspecified stands for all of that uplink's.
pub fn keeping(
    present: Option<(IfIndex, IpAddr)>,
    flow: &FlowTuple,
) -> impl FnMut(&[&RouteEntry]) -> usize {
    move |hops| {
        let is_present = |hop: &&RouteEntry| {
            let neighbour = hop.gateway.unwrap_or(flow.remote);
            present.is_some_and(|(ifindex, known)| {
                ifindex == hop.ifindex && (known.is_unspecified() || known == neighbour)
            })
        };
        let kept = hops.iter().position(is_present);
        kept.unwrap_or_else(|| position(hash(flow), hops))
    }
}

/// Returns the position of the next hop in whose share a hash is.
fn position(hash: u32, hops: &[&RouteEntry]) -> usize {
    let weight = |hop: &&RouteEntry| u64::from(hop.share.weight.max(1));
    let all: u64 = hops.iter().map(weight).sum();
    let mut at = (u64::from(hash) * all) >> 32;
    for (position, hop) in hops.iter().enumerate() {
        match at.checked_sub(weight(hop)) {
            Some(left) => at = left,
            None => return position,
        }
    }
    0
}

/// Hash of a flow's tuple: each bit of it depends on all of the tuple's.
fn hash(flow: &FlowTuple) -> u32 {
    /// 2^64 divided by the golden ratio, and the factors of SplitMix64's finalizer.
    const SPREAD: u64 = 0x9e37_79b9_7f4a_7c15;
    const FINAL: [u64; 2] = [0xbf58_476d_1ce4_e5b9, 0x94d0_49bb_1331_11eb];
    let bits = |addr: IpAddr| match addr {
        IpAddr::V4(addr) => addr.to_bits().into(),
        IpAddr::V6(addr) => addr.to_bits(),
    };
    let mixed = |state: u64| {
        let state = (state ^ state >> 30).wrapping_mul(FINAL[0]);
        let state = (state ^ state >> 27).wrapping_mul(FINAL[1]);
        state ^ state >> 31
    };
    let (local, remote) = (bits(flow.local), bits(flow.remote));
    let ports = u64::from(flow.local_port) << 32
        | u64::from(flow.remote_port) << 16
        | u64::from(flow.protocol);
    let words = [
        flow.scope.into(),
        local as u64,
        (local >> 64) as u64,
        remote as u64,
        (remote >> 64) as u64,
        ports,
    ];
    let hash = words.into_iter().fold(0, |state: u64, word| {
        mixed(state.wrapping_add(SPREAD) ^ word)
    });
    (hash >> 32) as u32
}

#[cfg(test)]
#[path = "spread_test.rs"]
mod tests;
