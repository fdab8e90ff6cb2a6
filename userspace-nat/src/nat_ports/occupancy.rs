//! A set of busy offsets in a range, and the number of offsets of each holder. It is a short list;
//! when it grows, a bitmap with counts.
use slipgate_abi::VmId;

/// Most offsets that are kept as a list.
const FEW: usize = 6;

/// Busy offsets toward one destination, with their holders.
#[derive(Debug)]
pub(super) enum Occupancy {
    Few {
        offsets: [u16; FEW],
        holders: [VmId; FEW],
        len: u8,
    },
    Many {
        words: Box<[u64]>,
        len: u32,
        held: Held,
    },
}

/// Number of offsets of each holder, sorted by holder. No entry is 0.
#[derive(Debug, Default)]
pub(super) struct Held(Vec<(VmId, u32)>);

impl Held {
    fn of(&self, holder: VmId) -> usize {
        let at = self.0.binary_search_by_key(&holder, |(h, _)| *h);
        at.map_or(0, |at| self.0[at].1 as usize)
    }

    fn more(&mut self, holder: VmId) {
        match self.0.binary_search_by_key(&holder, |(h, _)| *h) {
            Ok(at) => self.0[at].1 += 1,
            Err(at) => self.0.insert(at, (holder, 1)),
        }
    }

    fn less(&mut self, holder: VmId) {
        if let Ok(at) = self.0.binary_search_by_key(&holder, |(h, _)| *h) {
            self.0[at].1 -= 1;
            if self.0[at].1 == 0 {
                self.0.remove(at);
            }
        }
    }
}

impl Default for Occupancy {
    fn default() -> Self {
        Self::Few {
            offsets: [0; FEW],
            holders: [VmId::NONE; FEW],
            len: 0,
        }
    }
}

impl Occupancy {
    pub(super) fn len(&self) -> usize {
        match self {
            Self::Few { len, .. } => usize::from(*len),
            Self::Many { len, .. } => *len as usize,
        }
    }

    fn few(&self) -> Option<&[u16]> {
        match self {
            Self::Few { offsets, len, .. } => Some(&offsets[..usize::from(*len)]),
            Self::Many { .. } => None,
        }
    }

    /// Returns the number of offsets of a holder.
    pub(super) fn held_by(&self, holder: VmId) -> usize {
        match self {
            Self::Few { holders, len, .. } => holders[..usize::from(*len)]
                .iter()
                .filter(|h| **h == holder)
                .count(),
            Self::Many { held, .. } => held.of(holder),
        }
    }

    /// Whether an offset is busy.
    pub(super) fn contains(&self, offset: usize) -> bool {
        match self {
            Self::Few { offsets, len, .. } => {
                let mut few = offsets[..usize::from(*len)].iter();
                few.any(|busy| usize::from(*busy) == offset)
            }
            Self::Many { words, .. } => words[offset / 64] & 1 << (offset % 64) != 0,
        }
    }

    /// Returns the first free offset at or after `start`, wrapping at `size`; `None` when none is
    /// free.
    pub(super) fn first_free_from(&self, start: usize, size: usize) -> Option<usize> {
        let Self::Many { words, len, .. } = self else {
            let busy = self.few()?;
            return (0..size.min(FEW + 1))
                .map(|i| (start + i) % size)
                .find(|offset| !busy.contains(&(*offset as u16)));
        };
        if *len as usize >= size {
            return None;
        }
        let (first, bit) = (start / 64, start % 64);
        let n = words.len();
        // The first word is examined twice: from `start` on, and at the end as a whole.
        for i in 0..=n {
            let at = (first + i) % n;
            let mut free = !words[at];
            if i == 0 {
                free &= u64::MAX << bit;
            }
            if free != 0 {
                return Some(at * 64 + free.trailing_zeros() as usize);
            }
        }
        None
    }

    /// Marks the first offset of an empty set busy.
    pub(super) fn set_first(&mut self, offset: u16, holder: VmId) {
        if let Self::Few {
            offsets,
            holders,
            len: len @ 0,
        } = self
        {
            (offsets[0], holders[0], *len) = (offset, holder, 1);
        }
    }

    /// Marks an offset busy for a holder. A busy offset keeps its holder.
    pub(super) fn set(&mut self, offset: usize, holder: VmId, size: usize) {
        if self
            .few()
            .is_some_and(|busy| busy.len() == FEW && !busy.contains(&(offset as u16)))
        {
            self.grow(size);
        }
        match self {
            Self::Few {
                offsets,
                holders,
                len,
            } => {
                let n = usize::from(*len);
                if !offsets[..n].contains(&(offset as u16)) {
                    offsets[n] = offset as u16;
                    holders[n] = holder;
                    *len += 1;
                }
            }
            Self::Many { words, len, held } => {
                let bit = 1 << (offset % 64);
                if words[offset / 64] & bit == 0 {
                    words[offset / 64] |= bit;
                    *len += 1;
                    held.more(holder);
                }
            }
        }
    }

    /// Frees an offset of a holder.
    pub(super) fn clear(&mut self, offset: usize, holder: VmId) {
        match self {
            Self::Few {
                offsets,
                holders,
                len,
            } => {
                let n = usize::from(*len);
                if let Some(at) = offsets[..n].iter().position(|o| usize::from(*o) == offset) {
                    offsets[at] = offsets[n - 1];
                    holders[at] = holders[n - 1];
                    *len -= 1;
                }
            }
            Self::Many { words, len, held } => {
                let bit = 1 << (offset % 64);
                if words[offset / 64] & bit != 0 {
                    words[offset / 64] &= !bit;
                    *len -= 1;
                    held.less(holder);
                }
            }
        }
    }

    /// Transfers a busy offset to another holder.
    pub(super) fn hand_over(&mut self, offset: usize, from: VmId, to: VmId) {
        match self {
            Self::Few {
                offsets,
                holders,
                len,
            } => {
                let mut few = offsets[..usize::from(*len)].iter();
                if let Some(at) = few.position(|o| usize::from(*o) == offset) {
                    holders[at] = to;
                }
            }
            Self::Many { held, .. } => {
                held.less(from);
                held.more(to);
            }
        }
    }

    fn grow(&mut self, size: usize) {
        let mut words = vec![0u64; size.div_ceil(64)].into_boxed_slice();
        // Bits past the range in the last word are never free.
        if !size.is_multiple_of(64) {
            words[size / 64] = u64::MAX << (size % 64);
        }
        let mut held = Held::default();
        let Self::Few {
            offsets,
            holders,
            len,
        } = self
        else {
            return;
        };
        let n = usize::from(*len);
        for (offset, holder) in offsets[..n].iter().zip(holders) {
            words[usize::from(*offset) / 64] |= 1 << (offset % 64);
            held.more(*holder);
        }
        let len = n as u32;
        *self = Self::Many { words, len, held };
    }
}
