//! What is wrong with a flag, or with a policy file.
use std::{
    fmt,
    path::{Path, PathBuf},
};

use super::place::FilePlace;

/// A value that cannot be used: where it was given, what is wrong, what would do.
#[derive(Debug, PartialEq, Eq)]
pub struct ConfigError {
    at: At,
    /// What is wrong.
    pub problem: String,
    /// What would do.
    pub remedy: String,
}

/// Where what was given stands.
#[derive(Debug, PartialEq, Eq)]
enum At {
    Flag { flag: &'static str, given: String },
    File(PathBuf),
    InFile(Box<FilePlace>),
}

impl ConfigError {
    /// Of a flag's value.
    pub fn new(
        flag: &'static str,
        given: impl ToString,
        problem: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        let given = given.to_string();
        Self::at(At::Flag { flag, given }, problem, remedy)
    }

    /// Of a file as a whole.
    pub fn of_file(path: &Path, problem: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self::at(At::File(path.to_owned()), problem, remedy)
    }

    /// Of a place in a file.
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

    /// What was given, where a flag was.
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
