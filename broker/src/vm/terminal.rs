//! The user's terminal as a guest's console: raw while the guest runs, and put back however we end.
use std::{
    os::fd::AsFd as _,
    sync::{Mutex, Once, PoisonError},
};

use nix::{
    sys::termios::{OutputFlags, SetArg, Termios, cfmakeraw, tcgetattr, tcsetattr},
    unistd::{getpgrp, isatty, tcgetpgrp},
};

/// How the terminal was, while it is raw.
static SAVED: Mutex<Option<Termios>> = Mutex::new(None);

/// Whether stdin is a terminal whose keys are for us.
pub(super) fn is_ours() -> bool {
    let stdin = std::io::stdin();
    isatty(&stdin).unwrap_or(false) && tcgetpgrp(&stdin).is_ok_and(|group| group == getpgrp())
}

/// A terminal in raw mode; back in its own when this is dropped, or in a panic.
#[derive(Debug)]
pub(super) struct Raw(());

impl Raw {
    /// Hands each key on as it is typed, ^C too. What is written still begins its lines at the left.
    pub(super) fn enter() -> nix::Result<Self> {
        static HOOK: Once = Once::new();
        HOOK.call_once(|| {
            let report = std::panic::take_hook();
            std::panic::set_hook(Box::new(move |panic| {
                restore();
                report(panic);
            }));
        });
        let stdin = std::io::stdin();
        let before = tcgetattr(&stdin)?;
        let mut raw = before.clone();
        cfmakeraw(&mut raw);
        raw.output_flags |= OutputFlags::OPOST | OutputFlags::ONLCR;
        *SAVED.lock().unwrap_or_else(PoisonError::into_inner) = Some(before);
        let entered = tcsetattr(stdin.as_fd(), SetArg::TCSANOW, &raw);
        entered.inspect_err(|_| restore())?;
        Ok(Self(()))
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        restore();
    }
}

/// Does nothing when it is as it was.
fn restore() {
    let saved = SAVED.lock().unwrap_or_else(PoisonError::into_inner).take();
    if let Some(before) = saved {
        // Of a terminal that is gone there is nothing to put back.
        let _ = tcsetattr(std::io::stdin().as_fd(), SetArg::TCSANOW, &before);
    }
}
