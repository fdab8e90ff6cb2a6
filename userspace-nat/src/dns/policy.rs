//! Where rules by domain name attach.
use std::net::IpAddr;

use super::name::Name;

/// What to do with a question.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NameVerdict {
    /// Ask.
    Allow,
    /// Answer REFUSED.
    Refuse,
    /// Answer that the name does not exist.
    NxDomain,
}

/// Decides about names. Called for every question and every answer of every guest, from the cache
/// or not, so that what one guest was told is known for that guest.
pub trait NamePolicy {
    /// Before a question is looked up. `name` is in lower case.
    fn question(&mut self, vm: u32, name: Name<'_>, qtype: u16) -> NameVerdict;

    /// Before an answer goes to the guest. The iterator gives the addresses in the answer section
    /// with their remaining TTL, seconds; it reads them only when asked to.
    fn answer(
        &mut self,
        vm: u32,
        name: Name<'_>,
        addresses: &mut dyn Iterator<Item = (IpAddr, u32)>,
    );
}

/// No rule by name.
#[derive(Clone, Copy, Debug, Default)]
pub struct AllowAll;

impl NamePolicy for AllowAll {
    fn question(&mut self, _: u32, _: Name<'_>, _: u16) -> NameVerdict {
        NameVerdict::Allow
    }

    fn answer(&mut self, _: u32, _: Name<'_>, _: &mut dyn Iterator<Item = (IpAddr, u32)>) {}
}

/// No DNS: what a guest has to say to the owner of a name stays unsaid.
#[derive(Clone, Copy, Debug, Default)]
pub struct RefuseAll;

impl NamePolicy for RefuseAll {
    fn question(&mut self, _: u32, _: Name<'_>, _: u16) -> NameVerdict {
        NameVerdict::Refuse
    }

    fn answer(&mut self, _: u32, _: Name<'_>, _: &mut dyn Iterator<Item = (IpAddr, u32)>) {}
}
