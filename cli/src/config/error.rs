//! What is wrong with a flag, or with a policy file.
use std::{fmt, path::Path};

use super::policy_file::Place;

/// A value that cannot be used: which flag, what was given, what is wrong, what would do. Of a
/// policy file: where in it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct ConfigError {
    /// Empty: a file as a whole is meant.
    pub(crate) flag: &'static str,
    pub(crate) given: String,
    pub(crate) problem: String,
    pub(crate) remedy: String,
    /// Then neither `flag` nor `given` is there.
    place: Option<Box<Place>>,
}

impl ConfigError {
    pub(crate) fn new(
        flag: &'static str,
        given: impl ToString,
        problem: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        Self {
            flag,
            given: given.to_string(),
            problem: problem.into(),
            remedy: remedy.into(),
            place: None,
        }
    }

    /// Of a file as a whole.
    pub(crate) fn of_file(
        path: &Path,
        problem: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        Self::new("", path.display(), problem, remedy)
    }

    pub(crate) fn in_file(
        place: Place,
        problem: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        Self {
            place: Some(Box::new(place)),
            ..Self::new("", "", problem, remedy)
        }
    }
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (problem, remedy) = (&self.problem, &self.remedy);
        match &self.place {
            Some(place) => write!(f, "{place}: {problem}; {remedy}\n{}", place.shown()),
            None if self.flag.is_empty() => write!(f, "{}: {problem}; {remedy}", self.given),
            None => write!(f, "{} {}: {problem}; {remedy}", self.flag, self.given),
        }
    }
}

impl std::error::Error for ConfigError {}
