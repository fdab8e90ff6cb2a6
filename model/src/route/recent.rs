//! Answers of recent look-ups in a route table.
//!
//! A table never changes, so an answer holds as long as its table. Many flows lead to few addresses,
//! and a look-up takes some 400 instructions. Each address has one place here, and shares it with
//! others: what was looked up last is kept.
use std::{cell::Cell, net::IpAddr};

use slipgate_abi::IfIndex;

use super::Route;

/// Number of places, some KiB together: a power of two.
const PLACES: usize = 64;

/// What a look-up depends on: the destination, the uplink and the source address.
pub(super) type Question = (IpAddr, Option<IfIndex>, Option<IpAddr>);

/// Recent look-ups with their answers. The default has no place for any.
#[derive(Clone, Debug, Default)]
pub(super) struct Recent(Vec<Cell<Option<(Question, Route)>>>);

impl Recent {
    /// Creates an empty set, for one table.
    pub(super) fn new() -> Self {
        Self(vec![Cell::new(None); PLACES])
    }

    /// Returns the answer to a question, which `look_up` finds if it is not known. It says too whether
    /// the answer holds for all flows: others are not kept.
    #[inline]
    pub(super) fn answer(
        &self,
        question: Question,
        look_up: impl FnOnce() -> (Route, bool),
    ) -> Route {
        let Some(place) = self.0.get(place_of(question.0)) else {
            return look_up().0;
        };
        if let Some((known, route)) = place.get()
            && known == question
        {
            return route;
        }
        let (route, is_for_all) = look_up();
        if is_for_all {
            place.set(Some((question, route)));
        }
        route
    }
}

/// Returns the number of an address's place.
fn place_of(addr: IpAddr) -> usize {
    /// 2^32 divided by the golden ratio: upper bits of a product with it depend on all lower bits.
    const SPREAD: u32 = 0x9e37_79b9;
    let bits = match addr {
        IpAddr::V4(addr) => addr.to_bits(),
        IpAddr::V6(addr) => {
            let [a, b, c, d] = [96, 64, 32, 0].map(|shift| (addr.to_bits() >> shift) as u32);
            a ^ b ^ c ^ d
        }
    };
    bits.wrapping_mul(SPREAD) as usize >> (32 - PLACES.ilog2()) & (PLACES - 1)
}

#[cfg(test)]
#[path = "recent_test.rs"]
mod tests;
