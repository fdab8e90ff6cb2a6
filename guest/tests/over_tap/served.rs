//! A thread of a network namespace that answers until its server is dropped.

use std::{
    net::UdpSocket,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::JoinHandle,
    time::Duration,
};

use slipgate_testbed::NetNs;

/// Server on a socket, which stops when dropped.
pub(crate) struct Served {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Served {
    /// Has `answer` take each message that comes, with the socket for the answer.
    pub(crate) fn start(
        ns: &NetNs,
        name: &str,
        socket: UdpSocket,
        answer: impl Fn(&UdpSocket, &[u8]) + Send + 'static,
    ) -> Served {
        socket
            .set_read_timeout(Some(Duration::from_millis(20)))
            .unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let serve = move || {
            let mut buffer = [0; 2048];
            while !stopped.load(Ordering::Relaxed) {
                if let Ok((len, _)) = socket.recv_from(&mut buffer) {
                    answer(&socket, &buffer[..len]);
                }
            }
        };
        Served {
            stop,
            thread: Some(ns.thread(name, serve)),
        }
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
