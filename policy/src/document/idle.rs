//! `[idle]`: what does not count as activity of a VM.
use super::schema;
use crate::Idle;

/// Returns the settings of a policy in a file.
pub(super) fn of_file(said: &schema::Idle) -> Idle {
    let ignores = |what| said.ignores.contains(&what);
    Idle {
        ignores_keepalive: ignores(schema::Ignored::Keepalive),
        ignores_refused: ignores(schema::Ignored::Refused),
    }
}
