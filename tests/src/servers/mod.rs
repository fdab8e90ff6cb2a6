//! Servers for the world. Each runs on threads of its own in a namespace and stops on drop.

mod address;
mod dns;
mod http;
mod stun;
mod tcp;
mod udp;

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::JoinHandle,
    time::Duration,
};

pub use address::Address;
pub use dns::{Answer, DnsServer, Zone};
pub use http::HttpServer;
pub use stun::StunServer;
pub use tcp::{TcpServer, TcpService};
pub use udp::{UdpServer, UdpService};

/// Interval at which a server's blocked thread checks whether it should stop.
const STOP_POLL: Duration = Duration::from_millis(50);

/// A server's threads and their stop flag.
#[derive(Default)]
struct Running {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Running {
    fn stop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.stop();
    }
}
