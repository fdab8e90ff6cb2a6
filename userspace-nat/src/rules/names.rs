//! Which rules speak of a name, without trying them one by one.
//!
//! A name in wire form ends in each of its parents, so a look-up hashes the name and those of its
//! parents that have as many labels as some rule: the work grows with the length of the name,
//! which is bounded, not with the number of rules.
use std::collections::HashMap;

use super::NamePattern;
use crate::dns::Name;

/// Places of rules by the name they are about.
#[derive(Clone, Debug, Default)]
pub(super) struct NameMatcher {
    exact: HashMap<Box<[u8]>, Vec<u32>>,
    beneath: HashMap<Box<[u8]>, Vec<u32>>,
    /// Most labels of a name in `beneath`.
    deepest: usize,
}

impl NameMatcher {
    pub(super) fn new<'p>(patterns: impl Iterator<Item = (u32, &'p NamePattern)>) -> Self {
        let mut matcher = Self::default();
        for (order, pattern) in patterns {
            let (name, beneath) = pattern.key();
            let places = if beneath {
                matcher.deepest = matcher.deepest.max(Name(name).labels().count());
                &mut matcher.beneath
            } else {
                &mut matcher.exact
            };
            places.entry(name.into()).or_default().push(order);
        }
        matcher
    }

    /// Whether there is no rule by name.
    pub(super) fn is_empty(&self) -> bool {
        self.exact.is_empty() && self.beneath.is_empty()
    }

    /// Places of the rules about `name` (in lower case), ascending.
    pub(super) fn matching(&self, name: Name<'_>) -> Vec<u32> {
        let mut found = self.exact.get(name.0).cloned().unwrap_or_default();
        let labels = name.labels().count();
        let mut at = 0;
        for left in (0..labels).rev() {
            at += 1 + usize::from(name.0[at]);
            if left > 0 && left <= self.deepest {
                found.extend(self.beneath.get(&name.0[at..]).into_iter().flatten());
            }
        }
        found.sort_unstable();
        found
    }
}
