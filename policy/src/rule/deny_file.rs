//! Deny files: text files with one denied pattern by address or by name per line, `#` comments and
//! blank lines.
use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::{
    Destination,
    matcher::{Entry, Matcher},
    name::Name,
    name_pattern::{NameError, NamePattern},
    names::NameMatcher,
    pattern::Pattern,
};

/// A compiled deny file. It is one rule of a policy.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DenyFile {
    name: String,
    /// Patterns by address, each with its line, from 1.
    patterns: Vec<(u32, Pattern)>,
    matcher: Matcher,
    /// Patterns by name, each with its line, from 1.
    name_patterns: Vec<(u32, NamePattern)>,
    names: NameMatcher,
}

/// Error of a deny file: a line that cannot be parsed.
#[derive(Error, Debug)]
#[error("{file}:{line}: {why}")]
pub struct DenyFileError {
    /// Name of the file.
    pub file: String,
    /// Number of the line, from 1.
    pub line: u32,
    /// Error of the line's pattern.
    pub why: NameError,
}

impl DenyFile {
    /// Compiles a file's text; output shows `name` for it.
    ///
    /// # Errors
    /// A line is neither a pattern, a comment nor blank.
    pub fn parse(name: &str, text: &str) -> Result<Self, DenyFileError> {
        let (mut patterns, mut name_patterns) = (Vec::new(), Vec::new());
        for (line, number) in text.lines().zip(1..) {
            let rule = line.split_once('#').map_or(line, |(rule, _)| rule).trim();
            if rule.is_empty() {
                continue;
            }
            let bad = |why| DenyFileError {
                file: name.to_owned(),
                line: number,
                why,
            };
            if NamePattern::is_meant_by(rule) {
                name_patterns.push((number, rule.parse().map_err(bad)?));
            } else {
                patterns.push((number, rule.parse().map_err(|e| bad(NameError::Scope(e)))?));
            }
        }
        let matcher = Matcher::new(patterns.iter().map(|(line, pattern)| Entry {
            pattern: *pattern,
            order: *line,
        }));
        Ok(Self {
            name: name.to_owned(),
            patterns,
            matcher,
            names: NameMatcher::new(name_patterns.iter().map(|(line, pattern)| (*line, pattern))),
            name_patterns,
        })
    }

    /// Returns the name of the file.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the patterns by address, in the order of the lines.
    pub fn patterns(&self) -> impl Iterator<Item = Pattern> {
        self.patterns.iter().map(|(_, pattern)| *pattern)
    }

    /// Returns the first line, from 1, that denies `to`; `None` if no line does.
    pub fn line_for(&self, to: Destination) -> Option<u32> {
        self.matcher.first(to, 0)
    }

    /// Returns the pattern by address on a line, from 1; `None` if the line has none.
    pub fn pattern_at(&self, line: u32) -> Option<Pattern> {
        at(&self.patterns, line).copied()
    }

    /// Returns the pattern by name on a line, from 1; `None` if the line has none.
    pub fn name_at(&self, line: u32) -> Option<&NamePattern> {
        at(&self.name_patterns, line)
    }

    /// Whether the file has patterns by name.
    pub fn has_names(&self) -> bool {
        !self.names.is_empty()
    }

    /// Returns the lines, from 1, about a name (in lower case), ascending.
    /// Returns the patterns by name that match a name.
    pub(crate) fn names_about(&self, name: Name<'_>) -> impl Iterator<Item = &NamePattern> {
        let lines = self.lines_about(name).into_iter();
        lines.filter_map(|line| self.name_at(line))
    }

    pub(crate) fn lines_about(&self, name: Name<'_>) -> Vec<u32> {
        self.names.matching(name)
    }
}

fn at<P>(patterns: &[(u32, P)], line: u32) -> Option<&P> {
    let index = patterns.binary_search_by_key(&line, |(number, _)| *number);
    index.ok().map(|index| &patterns[index].1)
}

#[cfg(test)]
#[path = "deny_file_test.rs"]
mod tests;
