//! A file of denied destinations: one pattern per line, `#` comments, blank lines.
use std::{
    fs, io,
    path::{Path, PathBuf},
};

use thiserror::Error;

use super::{
    Destination, Pattern, PatternError,
    matcher::{Entry, Matcher},
};

/// A deny file, compiled. In a policy it is one rule.
#[derive(Clone, Debug)]
pub struct DenyFile {
    name: String,
    /// Each pattern with its line, from 1.
    patterns: Vec<(u32, Pattern)>,
    matcher: Matcher,
}

/// A deny file that can't be used.
#[derive(Error, Debug)]
pub enum DenyFileError {
    /// It could not be read.
    #[error(
        "Reading the deny file {path:?}: give a readable text file, one CIDR[:PORT[-PORT]][/PROTOCOL] per line"
    )]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A line could not be understood.
    #[error("{file}:{line}: {why}")]
    Line {
        /// The file.
        file: String,
        /// The line, from 1.
        line: u32,
        /// What is wrong with it.
        why: PatternError,
    },
}

impl DenyFile {
    /// Reads and compiles a file.
    pub fn load(path: &Path) -> Result<Self, DenyFileError> {
        let text = fs::read_to_string(path).map_err(|source| DenyFileError::Read {
            path: path.to_owned(),
            source,
        })?;
        Self::parse(&path.to_string_lossy(), &text)
    }

    /// Compiles a file's text; `name` stands for it in output.
    pub fn parse(name: &str, text: &str) -> Result<Self, DenyFileError> {
        let mut patterns = Vec::new();
        for (line, number) in text.lines().zip(1..) {
            let rule = line.split_once('#').map_or(line, |(rule, _)| rule).trim();
            if rule.is_empty() {
                continue;
            }
            let pattern = rule.parse().map_err(|why| DenyFileError::Line {
                file: name.to_owned(),
                line: number,
                why,
            })?;
            patterns.push((number, pattern));
        }
        let matcher = Matcher::new(patterns.iter().map(|(line, pattern)| Entry {
            pattern: *pattern,
            order: *line,
        }));
        Ok(Self {
            name: name.to_owned(),
            patterns,
            matcher,
        })
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its patterns, in the order of the lines.
    pub fn patterns(&self) -> impl Iterator<Item = Pattern> {
        self.patterns.iter().map(|(_, pattern)| *pattern)
    }

    /// The first line, from 1, that denies `to`.
    pub fn line_for(&self, to: Destination) -> Option<u32> {
        self.matcher.first(to, 0)
    }

    /// The pattern on a line, from 1.
    pub fn pattern_at(&self, line: u32) -> Option<Pattern> {
        let index = self
            .patterns
            .binary_search_by_key(&line, |(number, _)| *number);
        index.ok().map(|index| self.patterns[index].1)
    }
}

#[cfg(test)]
#[path = "deny_file_test.rs"]
mod tests;
