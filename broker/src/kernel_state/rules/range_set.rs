//! A set of numbers, as disjoint ranges in order.
use std::{collections::BTreeMap, ops::Range};

/// Disjoint ranges, none of which touches another.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct RangeSet {
    /// End of each range, by its start.
    ranges: BTreeMap<u32, u32>,
    len: u32,
}

impl RangeSet {
    /// Number of numbers in the set.
    pub(crate) const fn len(&self) -> u32 {
        self.len
    }

    /// Whether a number is in the set.
    pub(crate) fn contains(&self, number: u32) -> bool {
        let before = self.ranges.range(..=number).next_back();
        before.is_some_and(|(_, end)| number < *end)
    }

    /// Returns the ranges in order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = Range<u32>> {
        self.ranges.iter().map(|(start, end)| *start..*end)
    }

    /// Returns the start of the first range of so many numbers.
    pub(crate) fn first_fit(&self, numbers: u32) -> Option<u32> {
        let mut all = self.ranges.iter();
        let fits = all.find(|(start, end)| **end - **start >= numbers);
        fits.map(|(start, _)| *start)
    }

    /// Adds all numbers of a range.
    pub(crate) fn insert(&mut self, range: Range<u32>) {
        if range.is_empty() {
            return;
        }
        let (mut start, mut end) = (range.start, range.end);
        // Those that overlap or touch it become one with it.
        while let Some((&other, &other_end)) = self.ranges.range(..=end).next_back()
            && other_end >= start
        {
            self.take(other);
            (start, end) = (start.min(other), end.max(other_end));
        }
        self.put(start..end);
    }

    /// Removes all numbers of a range.
    pub(crate) fn remove(&mut self, range: Range<u32>) {
        if range.is_empty() {
            return;
        }
        while let Some((&other, &other_end)) = self.ranges.range(..range.end).next_back()
            && other_end > range.start
        {
            self.take(other);
            self.put(range.end.max(other)..other_end);
            self.put(other..range.start.min(other_end));
        }
    }

    fn take(&mut self, start: u32) {
        if let Some(end) = self.ranges.remove(&start) {
            self.len -= end - start;
        }
    }

    fn put(&mut self, range: Range<u32>) {
        if !range.is_empty() {
            self.len += range.end - range.start;
            self.ranges.insert(range.start, range.end);
        }
    }
}

impl FromIterator<Range<u32>> for RangeSet {
    fn from_iter<I: IntoIterator<Item = Range<u32>>>(ranges: I) -> Self {
        let mut set = Self::default();
        ranges.into_iter().for_each(|range| set.insert(range));
        set
    }
}

#[cfg(test)]
#[path = "range_set_test.rs"]
mod tests;
