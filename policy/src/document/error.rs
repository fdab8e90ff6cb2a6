//! Errors of flags and policy files.
use std::{
    fmt,
    path::{Path, PathBuf},
};

use super::place::FilePlace;

/// Error of a value that cannot be used: where it was given, the problem, and a remedy.
#[derive(Debug, PartialEq, Eq)]
pub struct ConfigError {
    at: At,
    /// Description of the problem.
    pub problem: String,
    /// Suggestion how to correct it.
    pub remedy: String,
}

/// Place where the value was given.
#[derive(Debug, PartialEq, Eq)]
enum At {
    Flag { flag: &'static str, given: String },
    File(PathBuf),
    InFile(Box<FilePlace>),
}

impl ConfigError {
    /// Creates an error about a flag's value.
    pub fn new(
        flag: &'static str,
        given: impl ToString,
        problem: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        let given = given.to_string();
        Self::at(At::Flag { flag, given }, problem, remedy)
    }

    /// Creates an error about a file as a whole.
    pub fn of_file(path: &Path, problem: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self::at(At::File(path.to_owned()), problem, remedy)
    }

    /// Creates an error about a place in a file.
    pub fn in_file(
        place: FilePlace,
        problem: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        Self::at(At::InFile(Box::new(place)), problem, remedy)
    }

    fn at(at: At, problem: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self {
            at,
            problem: problem.into(),
            remedy: remedy.into(),
        }
    }

    /// Returns the value of the flag; empty for errors of files.
    pub fn given(&self) -> &str {
        match &self.at {
            At::Flag { given, .. } => given,
            At::File(_) | At::InFile(_) => "",
        }
    }
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (problem, remedy) = (&self.problem, &self.remedy);
        match &self.at {
            At::Flag { flag, given } => write!(f, "{flag} {given}: {problem}; {remedy}"),
            At::File(path) => write!(f, "{}: {problem}; {remedy}", path.display()),
            At::InFile(place) => write!(f, "{place}: {problem}; {remedy}\n{}", place.shown()),
        }
    }
}

impl std::error::Error for ConfigError {}
