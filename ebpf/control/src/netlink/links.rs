//! The network devices of a namespace, found by index and by name.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    ops::Index,
};

use slipgate_abi::IfIndex;

use super::network::Link;

/// Network devices. Finding one takes the same time however many there are.
#[derive(Clone, Debug, Default)]
pub struct Links {
    by_index: BTreeMap<IfIndex, Link>,
    by_name: HashMap<String, IfIndex>,
}

impl Links {
    /// Returns a device by its index.
    pub fn get(&self, ifindex: &IfIndex) -> Option<&Link> {
        self.by_index.get(ifindex)
    }

    /// Returns a device by its name.
    pub fn named(&self, name: &str) -> Option<&Link> {
        let link = self.by_index.get(self.by_name.get(name)?);
        link.filter(|link| link.name == name)
    }

    /// Returns all devices, in order of their indexes.
    pub fn values(&self) -> impl Iterator<Item = &Link> {
        self.by_index.values()
    }

    /// Returns the indexes of all devices, in order.
    pub fn indexes(&self) -> impl Iterator<Item = IfIndex> {
        self.by_index.keys().copied()
    }

    /// Adds a device, in place of the one with its index, which is returned.
    pub fn insert(&mut self, link: Link) -> Option<Link> {
        let ifindex = link.ifindex;
        let name = link.name.clone();
        let before = self.by_index.insert(ifindex, link);
        if let Some(before) = before.as_ref().filter(|before| before.name != name) {
            self.forget_name(before);
        }
        self.by_name.insert(name, ifindex);
        before
    }

    /// Removes a device and returns it.
    pub fn remove(&mut self, ifindex: &IfIndex) -> Option<Link> {
        let gone = self.by_index.remove(ifindex)?;
        self.forget_name(&gone);
        Some(gone)
    }

    /// Another device may have the name by now.
    fn forget_name(&mut self, link: &Link) {
        if self.by_name.get(&link.name) == Some(&link.ifindex) {
            self.by_name.remove(&link.name);
        }
    }

    /// Adds the names of the devices that are not the same in `other` to `names`.
    pub(super) fn differences(&self, other: &Self, names: &mut BTreeSet<String>) {
        for (one, another) in [(self, other), (other, self)] {
            let differ = one
                .values()
                .filter(|link| another.get(&link.ifindex) != Some(link));
            names.extend(differ.map(|link| link.name.clone()));
        }
    }
}

impl Index<&IfIndex> for Links {
    type Output = Link;

    fn index(&self, ifindex: &IfIndex) -> &Link {
        &self.by_index[ifindex]
    }
}

/// Names follow from the devices.
impl PartialEq for Links {
    fn eq(&self, other: &Self) -> bool {
        self.by_index == other.by_index
    }
}

impl Eq for Links {}

#[cfg(test)]
#[path = "links_test.rs"]
mod tests;
