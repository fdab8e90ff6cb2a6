//! One matrix of tests: what is said of slipgate is said once, and tested in each mode and for each
//! family.
//!
//! A body takes a [`Cell`] and makes its stand by it ([`Stand::of`](crate::Stand::of)). `matrix!` makes
//! a test of each cell: `body::hybrid_ipv4`, `body::hybrid_ipv6`, `body::user_ipv4`,
//! `body::user_ipv6`. A cell in which there is no such thing to test is named too, with the reason;
//! a line that forgets a cell does not compile. docs/test-matrix.md lists all of them.

mod listing;
mod places;
mod pools;
mod starts;

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

// The tests give the guest its address of IPv6 at once.
pub(crate) use slipgate_testbed::world_ipv6::{GATEWAY6, GUEST6};

pub(crate) use self::{
    places::at,
    pools::{add_address, remove_address},
    starts::{pings, refused_start},
};
use crate::{DNS, GUEST};

/// Who carries a flow that was let in.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Mode {
    /// The kernel, between a TAP and the uplink.
    Hybrid,
    /// The engine, between a socket and sockets of the host, as a user without privileges.
    User,
}

/// The guest's family of addresses, and the servers'.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Family {
    Ipv4,
    Ipv6,
}

/// A place in the matrix.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Cell {
    pub(crate) mode: Mode,
    pub(crate) family: Family,
}

/// The cells, by the names of their tests.
#[allow(non_upper_case_globals, reason = "each is the name of a test")]
pub(crate) mod cells {
    use super::{Cell, Family, Mode};

    pub(crate) const hybrid_ipv4: Cell = Cell::new(Mode::Hybrid, Family::Ipv4);
    pub(crate) const hybrid_ipv6: Cell = Cell::new(Mode::Hybrid, Family::Ipv6);
    pub(crate) const user_ipv4: Cell = Cell::new(Mode::User, Family::Ipv4);
    pub(crate) const user_ipv6: Cell = Cell::new(Mode::User, Family::Ipv6);
}

impl Cell {
    const fn new(mode: Mode, family: Family) -> Self {
        Self { mode, family }
    }

    const fn number(self) -> usize {
        self.mode as usize * 2 + self.family as usize
    }

    pub(crate) fn is_hybrid(self) -> bool {
        self.mode == Mode::Hybrid
    }

    pub(crate) fn is_ipv6(self) -> bool {
        self.family == Family::Ipv6
    }

    /// Returns the guest's address of this family.
    pub(crate) fn guest(self) -> IpAddr {
        self.family.choose(GUEST, GUEST6)
    }

    /// The address at which slipgate answers the guest's questions.
    pub(crate) fn dns(self) -> IpAddr {
        self.family.choose(DNS, GATEWAY6)
    }
}

impl Family {
    /// One of two addresses.
    pub(crate) fn choose(self, ipv4: Ipv4Addr, ipv6: Ipv6Addr) -> IpAddr {
        match self {
            Self::Ipv4 => ipv4.into(),
            Self::Ipv6 => ipv6.into(),
        }
    }

    /// The address that stands for all of a host's.
    pub(crate) fn unspecified(self) -> IpAddr {
        self.choose(Ipv4Addr::UNSPECIFIED, Ipv6Addr::UNSPECIFIED)
    }
}

/// Stops the compiler where a line names a cell twice or not at all.
pub(crate) const fn assert_whole(named: &[Cell]) {
    let mut times = [0; 4];
    let mut at = 0;
    while at < named.len() {
        times[named[at].number()] += 1;
        at += 1;
    }
    let mut cell = 0;
    while cell < times.len() {
        assert!(times[cell] == 1, "each cell is to be named once");
        cell += 1;
    }
}

/// Makes the tests of each body, by its cells. Behind `without` is what has no such test, and why.
macro_rules! matrix {
    ($($body:ident: [$($cell:ident),+] $(, without [$($left_out:ident),+]: $reason:literal)*;)+) => {$(
        mod $body {
            const _: () = $crate::matrix::assert_whole(&[
                $($crate::matrix::cells::$cell),+
                $($(, $crate::matrix::cells::$left_out)+)*
            ]);
            $(
                #[test]
                fn $cell() {
                    slipgate_testbed::require_root_and_tun!();
                    super::$body($crate::matrix::cells::$cell);
                }
            )+
        }
    )+};
}

pub(crate) use matrix;
