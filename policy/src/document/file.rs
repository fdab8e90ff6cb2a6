//! `--policy FILE`: rules, quotas and forwards in TOML, as flags give them.
//!
//! A file is one policy for all VMs (its top level), named ones (`[policy.NAME]`), or both. Errors
//! give the line and column. This module reads the file; `super::meaning` interprets it.
use std::{
    ops::Range,
    path::{Path, PathBuf},
};

use super::{error::ConfigError, place::FilePlace, schema::Document};

/// Remedy in errors of TOML's reader.
const REMEDY: &str = "see `slipgate policy schema` for the keys and their values";

/// A policy file, parsed as TOML.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PolicyFile {
    path: PathBuf,
    text: String,
    /// Contents of the file.
    pub document: Document,
}

impl PolicyFile {
    /// Parses the text. `path` is shown in errors, and other files are found relative to it.
    ///
    /// # Errors
    /// The text is not TOML, or has unknown keys or values of the wrong type.
    pub fn parse(path: &Path, text: String) -> Result<Self, ConfigError> {
        match toml::from_str(&text) {
            Ok(document) => Ok(Self {
                path: path.to_owned(),
                text,
                document,
            }),
            Err(e) => {
                let place = FilePlace::new(path, &text, &e.span().unwrap_or(0..0));
                let problem = in_plain_words(e.message());
                Err(ConfigError::in_file(place, problem, REMEDY))
            }
        }
    }

    /// A document whose text, or a part of it, was read before.
    pub(super) fn of(path: &Path, text: String, document: Document) -> Self {
        Self {
            path: path.to_owned(),
            text,
            document,
        }
    }

    /// Returns the path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the whole text of the file.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Returns the path as messages show it.
    pub fn name(&self) -> String {
        self.path.display().to_string()
    }

    /// Returns the path of a file that the policy file names, relative to the policy file.
    pub fn beside(&self, name: &str) -> PathBuf {
        self.path.parent().unwrap_or(Path::new("")).join(name)
    }

    /// Returns `FILE:LINE` of a part of the text.
    pub fn line(&self, span: &Range<usize>) -> String {
        let place = FilePlace::new(&self.path, &self.text, span);
        format!("{}:{}", place.file, place.line)
    }

    /// Creates an error about a part of the text.
    pub fn error(
        &self,
        span: &Range<usize>,
        problem: impl Into<String>,
        remedy: impl Into<String>,
    ) -> ConfigError {
        let place = FilePlace::new(&self.path, &self.text, span);
        ConfigError::in_file(place, problem, remedy)
    }
}

/// Rewrites an error of TOML's reader without names of this program's types.
fn in_plain_words(problem: &str) -> String {
    problem
        .trim_end()
        .replace('\n', ", ")
        .replace(
            "expected struct RuleEntry",
            "expected a table, as in { allow = \"example.com:443\" }",
        )
        .replace("wanted string or table", "expected a text in quotes")
        .replace("` as i128", "`")
}

#[cfg(test)]
#[path = "file_test.rs"]
mod tests;
