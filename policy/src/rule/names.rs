//! Look-up of the rules about a name, without trying them one by one.
//!
//! A name in wire form ends in each of its parents. A look-up therefore hashes the name and those
//! of its parents that have no more labels than the deepest wildcard rule. The work grows with the
//! length of the name, which is bounded, not with the number of rules.
use std::collections::HashMap;

use serde::{Deserialize, Serialize};

use super::{name::Name, name_pattern::NamePattern};

/// Positions of the rules about each name.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct NameMatcher {
    /// Rules about one name, by that name in wire form.
    exact: HashMap<Box<[u8]>, Places>,
    /// Wildcard rules, by the parent of the names that they match.
    beneath: HashMap<Box<[u8]>, Places>,
    /// Number of labels of the longest name in `beneath`.
    deepest: usize,
}

/// Positions of the rules about one name, ascending: mostly a single one.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
enum Places {
    One(u32),
    More(Vec<u32>),
}

impl Places {
    fn as_slice(&self) -> &[u32] {
        match self {
            Self::One(place) => std::slice::from_ref(place),
            Self::More(places) => places,
        }
    }

    fn push(&mut self, place: u32) {
        match self {
            Self::One(first) => *self = Self::More(vec![*first, place]),
            Self::More(places) => places.push(place),
        }
    }
}

impl NameMatcher {
    pub(crate) fn new<'p>(patterns: impl IntoIterator<Item = (u32, &'p NamePattern)>) -> Self {
        let mut matcher = Self::default();
        for (place, pattern) in patterns {
            let name = pattern.name();
            let places = if pattern.is_exact() {
                &mut matcher.exact
            } else {
                matcher.deepest = matcher.deepest.max(name.labels().count());
                &mut matcher.beneath
            };
            match places.get_mut(name.0) {
                Some(places) => places.push(place),
                None => drop(places.insert(name.0.into(), Places::One(place))),
            }
        }
        matcher
    }

    /// Whether there is no rule by name.
    pub(crate) fn is_empty(&self) -> bool {
        self.exact.is_empty() && self.beneath.is_empty()
    }

    /// Returns the positions of the rules about `name` (in lower case), ascending.
    pub(crate) fn matching(&self, name: Name<'_>) -> Vec<u32> {
        let exact = self.exact.get(name.0);
        let mut found = exact.map_or_else(Vec::new, |places| places.as_slice().to_vec());
        for parent in self.parents_to_look_up(name) {
            let beneath = self.beneath.get(parent);
            found.extend(beneath.map_or(&[][..], Places::as_slice));
        }
        found.sort_unstable();
        found
    }

    /// Returns the parents of a name that may be in `beneath`, the longest first.
    fn parents_to_look_up<'n>(&self, name: Name<'n>) -> impl Iterator<Item = &'n [u8]> {
        let (labels, deepest) = (name.labels().count(), self.deepest);
        let mut at = 0;
        (0..labels).rev().filter_map(move |left| {
            at += 1 + usize::from(name.0[at]);
            (left > 0 && left <= deepest).then_some(&name.0[at..])
        })
    }
}

#[cfg(test)]
#[path = "names_test.rs"]
mod tests;
