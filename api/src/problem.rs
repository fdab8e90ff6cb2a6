//! Errors as problem details for HTTP APIs (RFC 9457).
use hyper::StatusCode;
use schemars::JsonSchema;
use serde::Serialize;

use crate::response::{Response, json};

/// Media type of a problem (RFC 9457, section 3).
pub const MEDIA_TYPE: &str = "application/problem+json";

/// A problem: what was asked, why it can't be done, and what would do.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, JsonSchema)]
pub struct Problem {
    /// Status code of the response.
    pub status: u16,
    /// Name of the status.
    pub title: String,
    /// What was given, why it can't be used, and what to give instead.
    pub detail: String,
}

impl Problem {
    /// Makes a problem with a status and a sentence.
    pub fn new(status: StatusCode, detail: impl Into<String>) -> Self {
        Self {
            status: status.as_u16(),
            title: status.canonical_reason().unwrap_or_default().to_owned(),
            detail: detail.into(),
        }
    }
}

impl From<Problem> for Response {
    fn from(problem: Problem) -> Self {
        let status = StatusCode::from_u16(problem.status);
        let status = status.unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        json(status, MEDIA_TYPE, &problem)
    }
}
