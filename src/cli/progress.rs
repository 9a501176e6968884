//! The progress bar of transfers.

use std::io::IsTerminal;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// A bar with rate and remaining time on stderr, or one that draws nothing if stderr is no terminal or `quiet` is set.
pub fn bar(len: u64, quiet: bool) -> ProgressBar {
    if quiet || !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let style =
        ProgressStyle::with_template("{wide_bar} {binary_bytes}/{binary_total_bytes} {binary_bytes_per_sec} {eta}")
            .expect("the template is a constant");
    // Ten frames a second: drawing must not compete with the transfer.
    ProgressBar::with_draw_target(Some(len), ProgressDrawTarget::stderr_with_hz(10)).with_style(style)
}
