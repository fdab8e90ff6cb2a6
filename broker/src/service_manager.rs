//! What a service manager is told (sd_notify(3)), where one has set `NOTIFY_SOCKET`: that guests are
//! served, that the policy is read again, that the end has begun, and, where it watches, that the
//! loop turns.
use std::time::{Duration, Instant};

use sd_notify::NotifyState;

/// The service manager that started this process, or none.
#[derive(Debug)]
pub(crate) struct ServiceManager {
    /// Interval of signs of life, and when the next is due; `None`: nobody watches.
    watchdog: Option<(Duration, Instant)>,
    /// Whether it was told that the policy is read again, and not yet that this is done.
    reloads: bool,
}

impl ServiceManager {
    /// Reads the environment.
    pub(crate) fn of_this_process() -> Self {
        // Two signs in its time, so that one may be late.
        let watchdog = sd_notify::watchdog_enabled().map(|within| within / 2);
        Self {
            watchdog: watchdog.map(|every| (every, Instant::now() + every)),
            reloads: false,
        }
    }

    /// Guests are served. `status`: a sentence for `systemctl status`.
    pub(crate) fn ready(&self, status: &str) {
        tell(&[NotifyState::Ready, NotifyState::Status(status)]);
    }

    /// The policy is read again.
    pub(crate) fn reloading(&mut self) {
        let Ok(now) = NotifyState::monotonic_usec_now() else {
            return;
        };
        self.reloads = true;
        tell(&[NotifyState::Reloading, now]);
    }

    /// Nothing is being changed: says so if it was told otherwise.
    pub(crate) fn reloaded(&mut self) {
        if std::mem::take(&mut self.reloads) {
            tell(&[NotifyState::Ready]);
        }
    }

    /// The end has begun.
    pub(crate) fn stopping(&self) {
        tell(&[NotifyState::Stopping]);
    }

    /// When the next sign of life is due.
    pub(crate) fn due(&self) -> Option<Instant> {
        self.watchdog.map(|(_, due)| due)
    }

    /// The loop turns: says so if it is time.
    pub(crate) fn is_alive(&mut self) {
        let now = Instant::now();
        if let Some((every, due)) = &mut self.watchdog
            && *due <= now
        {
            *due = now + *every;
            tell(&[NotifyState::Watchdog]);
        }
    }
}

/// Sends to the socket that `NOTIFY_SOCKET` names, if there is one. A manager that does not hear is
/// no reason not to serve.
fn tell(state: &[NotifyState]) {
    if let Err(e) = sd_notify::notify(state) {
        tracing::warn!("telling the service manager at NOTIFY_SOCKET: {e}");
    }
}
