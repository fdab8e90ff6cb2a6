//! Which offsets of a range are busy: a short list, a bitmap when it grows.

/// Longest list.
const FEW: usize = 6;

/// A set of offsets.
#[derive(Debug)]
pub(super) enum Occupancy {
    Few { offsets: [u16; FEW], len: u8 },
    Many { words: Box<[u64]>, len: u32 },
}

impl Default for Occupancy {
    fn default() -> Self {
        Self::Few {
            offsets: [0; FEW],
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
            Self::Few { offsets, len } => Some(&offsets[..usize::from(*len)]),
            Self::Many { .. } => None,
        }
    }

    /// The first free offset at or after `start`, wrapping at `size`.
    pub(super) fn first_free_from(&self, start: usize, size: usize) -> Option<usize> {
        let Self::Many { words, len } = self else {
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
        // The first word is looked at twice: from the bit on, and at the end up to it.
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

    /// Makes an offset busy.
    pub(super) fn set(&mut self, offset: usize, size: usize) {
        if self
            .few()
            .is_some_and(|busy| busy.len() == FEW && !busy.contains(&(offset as u16)))
        {
            self.grow(size);
        }
        match self {
            Self::Few { offsets, len } => {
                let n = usize::from(*len);
                if !offsets[..n].contains(&(offset as u16)) {
                    offsets[n] = offset as u16;
                    *len += 1;
                }
            }
            Self::Many { words, len } => {
                let bit = 1 << (offset % 64);
                if words[offset / 64] & bit == 0 {
                    words[offset / 64] |= bit;
                    *len += 1;
                }
            }
        }
    }

    /// Makes an offset free.
    pub(super) fn clear(&mut self, offset: usize) {
        match self {
            Self::Few { offsets, len } => {
                let n = usize::from(*len);
                if let Some(at) = offsets[..n].iter().position(|o| usize::from(*o) == offset) {
                    offsets[at] = offsets[n - 1];
                    *len -= 1;
                }
            }
            Self::Many { words, len } => {
                let bit = 1 << (offset % 64);
                if words[offset / 64] & bit != 0 {
                    words[offset / 64] &= !bit;
                    *len -= 1;
                }
            }
        }
    }

    fn grow(&mut self, size: usize) {
        let mut words = vec![0u64; size.div_ceil(64)].into_boxed_slice();
        // What lies past the range in the last word is never free.
        if !size.is_multiple_of(64) {
            words[size / 64] = u64::MAX << (size % 64);
        }
        let mut len = 0;
        for offset in self.few().into_iter().flatten() {
            words[usize::from(*offset) / 64] |= 1 << (offset % 64);
            len += 1;
        }
        *self = Self::Many { words, len };
    }
}
