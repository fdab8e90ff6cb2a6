//! Servers for the world. Each runs on threads of its own in a namespace and stops on drop.

mod tcp;

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::JoinHandle,
    time::Duration,
};

pub use tcp::{TcpServer, TcpService};

/// How often a server's blocked thread looks whether it should stop.
const STOP_POLL: Duration = Duration::from_millis(50);

/// A server's main thread and its stop flag.
struct Running {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Running {
    fn stop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.stop();
    }
}
