//! Log of the programs' logging build, as tracing events.

use std::os::fd::{AsFd, BorrowedFd};

use aya::Ebpf;
use aya_log::EbpfLogger;

use crate::{Error, Result};

/// Log buffer of the programs. Poll its descriptor, then call [`BpfLog::flush`].
#[derive(Debug)]
pub struct BpfLog(Inner);

struct Inner(EbpfLogger<ToTracing>);

impl std::fmt::Debug for Inner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("EbpfLogger")
    }
}

impl BpfLog {
    pub(crate) fn of(ebpf: &mut Ebpf) -> Result<Self> {
        EbpfLogger::init_with_logger(ebpf, ToTracing)
            .map(|logger| Self(Inner(logger)))
            .map_err(|error| Error::Load {
                what: "the programs' log".into(),
                reason: error.to_string(),
            })
    }

    /// Emits the records in the buffer.
    pub fn flush(&mut self) {
        self.0.0.flush();
    }
}

impl AsFd for BpfLog {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.0.as_fd()
    }
}

/// Adapter from the `log` crate, which aya-log uses, to tracing.
#[derive(Debug)]
struct ToTracing;

impl log::Log for ToTracing {
    fn enabled(&self, _: &log::Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &log::Record<'_>) {
        macro_rules! emit {
            ($level:ident) => {
                tracing::$level!(target: "bpf", program = record.target(), "{}", record.args())
            };
        }
        match record.level() {
            log::Level::Error => emit!(error),
            log::Level::Warn => emit!(warn),
            log::Level::Info => emit!(info),
            log::Level::Debug => emit!(debug),
            log::Level::Trace => emit!(trace),
        }
    }

    fn flush(&self) {}
}
