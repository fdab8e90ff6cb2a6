//! What is wrong with a flag.

/// A value that cannot be used: which flag, what was given, what is wrong, what would do.
#[derive(thiserror::Error, Debug, PartialEq, Eq)]
#[error("{flag} {given}: {problem}; {remedy}")]
pub(crate) struct ConfigError {
    pub(crate) flag: &'static str,
    pub(crate) given: String,
    pub(crate) problem: String,
    pub(crate) remedy: String,
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
        }
    }
}
