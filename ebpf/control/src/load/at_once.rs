//! Loading of programs: several at once, because the time of a load is the verifier's, which takes each
//! program by itself.
use std::{
    collections::HashMap,
    num::NonZero,
    os::fd::{AsFd as _, OwnedFd},
    panic,
    sync::{Mutex, PoisonError},
    thread,
};

use aya::{
    Ebpf,
    programs::{Program as AyaProgram, ProgramError},
};

use super::{no_program, refused};
use crate::{Error, Result};

/// Loads programs of these names. The later ones begin first: those that take longest belong at the end.
///
/// # Errors
/// The object does not have one, or the kernel refuses it.
pub(super) fn load<'n>(
    ebpf: &mut Ebpf,
    names: impl IntoIterator<Item = &'n str>,
) -> Result<HashMap<&'n str, OwnedFd>> {
    let mut of_object: HashMap<_, _> = ebpf.programs_mut().collect();
    let mut waiting = Vec::new();
    for name in names {
        let program = of_object.remove(name).ok_or_else(|| no_program(name))?;
        waiting.push((name, program));
    }
    let at_once = thread::available_parallelism().map_or(1, NonZero::get);
    let at_once = at_once.min(waiting.len());
    let waiting = Mutex::new(waiting);
    let take = || waiting.lock().unwrap_or_else(PoisonError::into_inner).pop();
    let work = || -> Result<Vec<(&str, OwnedFd)>> {
        let mut loaded = Vec::new();
        while let Some((name, program)) = take() {
            loaded.push((name, load_one(name, program)?));
        }
        Ok(loaded)
    };
    thread::scope(|scope| {
        // Where the kernel gives no thread, this one does it all.
        let another = |_| thread::Builder::new().spawn_scoped(scope, work).ok();
        let others: Vec<_> = (1..at_once).filter_map(another).collect();
        let mut loaded: HashMap<_, _> = work()?.into_iter().collect();
        for other in others {
            let theirs = other
                .join()
                .unwrap_or_else(|cause| panic::resume_unwind(cause));
            loaded.extend(theirs?);
        }
        Ok(loaded)
    })
}

fn load_one(name: &str, program: &mut AyaProgram) -> Result<OwnedFd> {
    let refused = |error: ProgramError| refused(&format!("the program {name}"), &error);
    let fd = match program {
        AyaProgram::SchedClassifier(program) => {
            retry(|| program.load()).map_err(refused)?;
            program.fd()
        }
        AyaProgram::Xdp(program) => {
            retry(|| program.load()).map_err(refused)?;
            program.fd()
        }
        other => {
            return Err(Error::Load {
                what: format!("the program {name}"),
                reason: format!("it is a {:?}", other.prog_type()),
            });
        }
    };
    fd.map_err(refused)?
        .as_fd()
        .try_clone_to_owned()
        .map_err(Error::os("duplicate a program's descriptor"))
}

/// Repeats a load: the verifier stops with EAGAIN when a signal arrives.
fn retry(mut load: impl FnMut() -> Result<(), ProgramError>) -> Result<(), ProgramError> {
    const TRIES: usize = 5;
    for _ in 1..TRIES {
        match load() {
            Err(ProgramError::LoadError { io_error, .. })
                if io_error.raw_os_error() == Some(libc::EAGAIN) => {}
            other => return other,
        }
    }
    load()
}

#[cfg(test)]
#[path = "at_once_test.rs"]
mod tests;
