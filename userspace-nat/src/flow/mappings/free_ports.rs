//! The free ports of a pool: one of them is picked by chance, whatever part of the range is taken.
use std::ops::RangeInclusive;

/// Place of a port that is not free. A list has at most 32,768 ports.
const ABSENT: u16 = u16::MAX;

/// Free ports of a range, by parity.
#[derive(Debug)]
pub(super) struct FreePorts {
    first: u16,
    free: [Vec<u16>; 2],
    /// Place of each port of the range in its list.
    places: Box<[u16]>,
}

impl FreePorts {
    /// Lists the ports of the range that `is_free` names.
    pub(super) fn new(range: &RangeInclusive<u16>, is_free: impl Fn(u16) -> bool) -> Self {
        let mut ports = Self {
            first: *range.start(),
            free: [Vec::new(), Vec::new()],
            places: vec![ABSENT; range.len()].into(),
        };
        for port in range.clone().filter(|port| is_free(*port)) {
            ports.insert(port);
        }
        ports
    }

    /// Returns the number of free ports.
    pub(super) fn len(&self) -> usize {
        self.free[0].len() + self.free[1].len()
    }

    /// Returns the port that a random number selects, of the same parity as `like` if there is one.
    pub(super) fn select(&self, like: u16, random: u32) -> Option<u16> {
        let same = &self.free[usize::from(like % 2)];
        let other = &self.free[usize::from(like % 2) ^ 1];
        let list = if same.is_empty() { other } else { same };
        let at = random as usize % list.len().max(1);
        list.get(at).copied()
    }

    /// Adds a port of the range that has become free.
    pub(super) fn insert(&mut self, port: u16) {
        let list = &mut self.free[usize::from(port % 2)];
        if let Some(place) = place(&mut self.places, self.first, port)
            && *place == ABSENT
        {
            *place = list.len() as u16;
            list.push(port);
        }
    }

    /// Removes a port that is taken.
    pub(super) fn remove(&mut self, port: u16) {
        let Some(place_of) = place(&mut self.places, self.first, port) else {
            return;
        };
        let at = std::mem::replace(place_of, ABSENT);
        if at == ABSENT {
            return;
        }
        let list = &mut self.free[usize::from(port % 2)];
        list.swap_remove(usize::from(at));
        if let Some(moved) = list.get(usize::from(at))
            && let Some(place) = place(&mut self.places, self.first, *moved)
        {
            *place = at;
        }
    }
}

fn place(places: &mut [u16], first: u16, port: u16) -> Option<&mut u16> {
    places.get_mut(usize::from(port.checked_sub(first)?))
}
