//! Errors as problem details for HTTP APIs (RFC 9457).
use hyper::StatusCode;
use schemars::JsonSchema;
use serde::Serialize;
use slipgate_ipc::{
    client::{ClientAnswer, ErrorKind},
    engine::EngineReply,
};

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
    /// Names the value at fault, why it cannot be used, and a value that can.
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

/// The broker's answer, unless it is an error. `name`: the VM or flow in question.
pub(crate) fn answer(answer: ClientAnswer, name: &str) -> Result<ClientAnswer, Problem> {
    match answer {
        ClientAnswer::UnknownVm { .. } => Err(no_vm(name)),
        ClientAnswer::Engine {
            reply: EngineReply::UnknownFlow,
        } => Err(Problem::new(
            StatusCode::NOT_FOUND,
            format!("no flow {name} lives: GET /v1/flows lists those that do, by id"),
        )),
        ClientAnswer::Error { error, kind } => {
            let status = match kind {
                ErrorKind::Invalid => StatusCode::UNPROCESSABLE_ENTITY,
                ErrorKind::Busy => StatusCode::SERVICE_UNAVAILABLE,
                ErrorKind::Forbidden => StatusCode::FORBIDDEN,
                ErrorKind::Replaced => StatusCode::PRECONDITION_FAILED,
                ErrorKind::Taken => StatusCode::CONFLICT,
                ErrorKind::Removed | ErrorKind::Unknown => StatusCode::NOT_FOUND,
            };
            Err(Problem::new(status, error))
        }
        other => Ok(other),
    }
}

/// The problem of a VM that is not there.
pub(crate) fn no_vm(name: &str) -> Problem {
    let detail = format!("no VM {name:?} is served: GET /v1/vms lists those that are");
    Problem::new(StatusCode::NOT_FOUND, detail)
}

/// The problem of a machine that is not there.
pub(crate) fn no_machine(name: &str) -> Problem {
    let detail = format!(
        "no machine of `slipgate run` has the VM {name:?} of this daemon: GET /v1/machines lists those \
         that are here"
    );
    Problem::new(StatusCode::NOT_FOUND, detail)
}

/// The problem of an answer that fits no request.
pub(crate) fn other_answer() -> Problem {
    let detail = "the daemon gave an answer to another question: it is of another version";
    Problem::new(StatusCode::INTERNAL_SERVER_ERROR, detail)
}
