//! `--policy FILE`: the same rules, quotas and forwards as flags have, in TOML.
//!
//! A file is one policy for all VMs (its top level), named ones (`[policy.NAME]`), or both. What is
//! wrong with it is said with the line and column. Its meaning is worked out by
//! `super::meaning`; here it is read.
use std::{
    ops::Range,
    path::{Path, PathBuf},
};

use super::{error::ConfigError, place::FilePlace, schema::Document};

/// Where help is.
const REMEDY: &str = "see `slipgate policy schema` for what there is";

/// A policy file, read and understood as TOML.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PolicyFile {
    path: PathBuf,
    text: String,
    /// What it says.
    pub document: Document,
}

impl PolicyFile {
    /// Understands its text; `path` stands for it in messages, and other files are found beside it.
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

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// All of it.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// As messages have it.
    pub fn name(&self) -> String {
        self.path.display().to_string()
    }

    /// A file that is named in it.
    pub fn beside(&self, name: &str) -> PathBuf {
        self.path.parent().unwrap_or(Path::new("")).join(name)
    }

    /// `FILE:LINE` of a part of its text.
    pub fn line(&self, span: &Range<usize>) -> String {
        let place = FilePlace::new(&self.path, &self.text, span);
        format!("{}:{}", place.file, place.line)
    }

    /// What is wrong with a part of its text.
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

/// What TOML's reader found, without the names that things have in this program.
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
