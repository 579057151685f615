//! `start`.

use crate::support::{N0, Sandbox, pid};

#[test]
fn start_default() {
    let machine = Sandbox::new();
    let record = machine.start(&[]);
    assert_eq!(machine.daemons(), [pid(&record)]);
    assert_eq!(
        machine.calls(),
        "nvidia-smi --query-gpu=index,uuid,compute_mode --format=csv,noheader
nvidia-cuda-mps-control -d
    CUDA_MPS_LOG_DIRECTORY=<S>/t/uni-cumps/gpu-u0/log
    CUDA_MPS_PIPE_DIRECTORY=<S>/t/uni-cumps/gpu-u0/pipe
    CUDA_MPS_PROTOCOL_VERSION=2
    CUDA_VISIBLE_DEVICES=GPU-U0
nvidia-cuda-mps-control
    CUDA_MPS_LOG_DIRECTORY=<S>/t/uni-cumps/gpu-u0/log
    CUDA_MPS_PIPE_DIRECTORY=<S>/t/uni-cumps/gpu-u0/pipe
    CUDA_MPS_PROTOCOL_VERSION=2
    < get_server_list
    < <marker>
"
    );
    assert!(machine.record_file(N0).exists());
    machine.run(["stop"]).succeeds().said_nothing();
    machine.has_no_daemon();
}
