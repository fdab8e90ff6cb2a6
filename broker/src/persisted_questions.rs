//! Guests' DNS questions that a stopped engine had not answered, in a file for the next start, which
//! asks them again. Only root has access to its directory.
use std::{
    fs, io,
    path::{Path, PathBuf},
    time::Duration,
};

use slipgate_ipc::engine::OpenQuestion;

use crate::persisted_policy::write_whole;

/// Time for which a guest waits for an answer: what a usual resolver of a guest has.
const AWAITED_FOR: Duration = Duration::from_secs(5);

fn path_of(run_dir: &Path, row: u32) -> PathBuf {
    run_dir.join(format!("{row}.questions"))
}

/// Keeps the questions of an owner's row.
pub(crate) fn keep(run_dir: &Path, row: u32, questions: &[OpenQuestion]) {
    if questions.is_empty() {
        return;
    }
    let written = serde_json::to_vec(questions)
        .map_err(io::Error::other)
        .and_then(|bytes| write_whole(&path_of(run_dir, row), &bytes));
    if let Err(e) = written {
        tracing::warn!(
            "guests have to ask {} questions again: {e}",
            questions.len()
        );
    }
}

/// Takes the questions of a predecessor in the row. None if guests no longer wait, or if a version
/// wrote them that this one can't read: guests ask again.
pub(crate) fn take(run_dir: &Path, row: u32) -> Vec<OpenQuestion> {
    let path = path_of(run_dir, row);
    let written = fs::metadata(&path).and_then(|file| file.modified());
    let age = written.ok().and_then(|at| at.elapsed().ok());
    let bytes = fs::read(&path).unwrap_or_default();
    // It is not there, as a rule.
    let _ = fs::remove_file(&path);
    match age.is_some_and(|age| age < AWAITED_FOR) {
        true => serde_json::from_slice(&bytes).unwrap_or_default(),
        false => Vec::new(),
    }
}
