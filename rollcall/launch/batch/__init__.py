"""The first process of a job: start the step, choose its hosts, requeue the job."""
